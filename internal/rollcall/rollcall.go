// Package rollcall lets the processes of a job agree on the remaining processes after some were
// lost. They exchange files in the checkpoint folder, which all of them can access, because the
// network that carried their messages has failed.
//
//	a remaining process      writes its own file              reads the verdict
//	rank 0                   reads all, waits for the silent  writes the verdict
//
// Rank 0 creates all files, empty, before any process looks for them, and each look opens a file
// again. A network file system then shows the data that another host has written (close-to-open
// consistency, and no cached missing names). A late process finds the verdict too, and sees that
// the job continues without it.
//
// The folders are opened once, and all files are accessed through them, as in package checkpoint. A
// folder or a file that another user owns is an error.
package rollcall

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spillway-ml/spillway/internal/filesys"
)

// Roll is the folder in which the processes of a job answer a roll call. The zero value belongs
// to a job without roll calls.
type Roll struct {
	Folder string // its absolute path on rank 0's host
	Ranks  int
	// Wait is the largest delay of a process compared with another: the longest wait of a
	// collective plus the time to end.
	Wait time.Duration
	// Before is the Folder of the job's previous roll call, "" for none. A process that was late
	// then may still look there.
	Before string

	in   filesys.Folder // the checkpoint folder; rank 0 only
	at   filesys.Folder // the roll's own folder; nil: not open in this process
	user int64          // the owner of files that this process makes there
}

// Verdict is rank 0's decision.
type Verdict struct {
	On   bool   // the job continues; otherwise it ends, and Why says why
	Go   []int  // ranks that continue, in ascending order; others that answered are not needed
	Lost []int  // ranks that did not answer
	Why  string // the reason, in words
}

const (
	prefix      = ".spillway-roll-"
	maxFile     = 1 << 20 // bytes: the verdict of the largest job has a few KiB
	verdictName = "verdict"
	lookEvery   = 20 * time.Millisecond
	hearing     = 3 * time.Second // a verdict that ends the job waits at most this long for the ranks that answered to read it
)

// ErrNoVerdict is the error for a roll call in which rank 0 gave no verdict.
var ErrNoVerdict = errors.New("rank 0 has not said who goes on")

// Open makes the roll of a job with the given number of ranks in the checkpoint folder in, and
// takes over ownership of in. It removes files of earlier jobs there, except the job's previous
// roll. If the previous roll is in another folder, the checkpoint folder's path has changed. That
// is an error, and the job does not continue.
func Open(in filesys.Folder, ranks int, wait time.Duration, before Roll) (r Roll, err error) {
	r = Roll{Ranks: ranks, Wait: wait, Before: cmp.Or(before.Folder, before.Before), in: in}
	defer func() {
		if err != nil {
			r.Before = "" // before removes it
			r.Close()
			r = Roll{}
		}
	}()
	if err := sameFolder(before.in, in); err != nil {
		return r, err
	}
	dir, err := filepath.Abs(in.Path())
	if err != nil {
		return r, err
	}
	if r.user, err = in.Owner(); err != nil {
		return r, err
	}
	old, err := in.Names()
	if err != nil {
		return r, err
	}
	for _, name := range old {
		if name != filepath.Base(r.Before) {
			r.remove(name)
		}
	}
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails: the process ends if the system has no randomness
	name := prefix + hex.EncodeToString(b[:])
	if err := in.Mkdir(name, 0o777); err != nil {
		return r, err
	}
	r.Folder = filepath.Join(dir, name)
	if err := r.enter(in); err != nil {
		return r, err
	}
	names := []string{verdictName}
	for rank := range ranks {
		names = append(names, strconv.Itoa(rank))
	}
	for _, name := range names {
		f, err := r.at.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
		if err == nil {
			err = f.Close()
		}
		if err != nil {
			return r, err
		}
	}
	if before.in != nil {
		_ = before.in.Close()
	}
	return r, nil
}

// sameFolder returns an error if the checkpoint folder is not that of the job's previous roll. A
// job without a previous roll passes.
func sameFolder(before, now filesys.Folder) error {
	if before == nil {
		return nil
	}
	a, err := before.Info()
	b, nerr := now.Info()
	if err = errors.Join(err, nerr); err == nil && !filesys.Same(a, b) {
		err = fmt.Errorf("%s is another folder than the one that the job began in (somebody renamed it, or retargeted a link); Config.Resume goes on in the one that has its checkpoints", now.Path())
	}
	return err
}

// Enter opens the roll in another rank's process. dir is the checkpoint folder's path in this
// process; "" means rank 0's path.
func (r Roll) Enter(o filesys.Opener, dir string) (Roll, error) {
	in, err := o.Open(cmp.Or(dir, filepath.Dir(r.Folder)))
	if err != nil {
		return Roll{}, err
	}
	r.in = nil
	if r.user, err = in.Owner(); err == nil {
		err = r.enter(in)
	}
	if err = errors.Join(err, in.Close()); err != nil {
		r.Close()
		return Roll{}, err
	}
	return r, nil
}

// enter opens the roll's folder. Its name is random, so a folder with this name is the one that
// rank 0 made.
func (r *Roll) enter(in filesys.Folder) (err error) {
	if r.at, err = in.Sub(filepath.Base(r.Folder)); err != nil {
		return err
	}
	st, err := r.at.Info()
	if err == nil {
		err = r.own(r.at.Path(), st)
	}
	return err
}

// own refuses files that another user made.
func (r Roll) own(path string, st filesys.Info) error {
	if st.Owner != r.user {
		return fmt.Errorf("%s belongs to user %d, and files that this process makes there belong to user %d: what another user wrote is not followed; give a folder of your own", path, st.Owner, r.user)
	}
	return nil
}

// Next returns the Roll with which the continuing ranks wait until rank 0 opens the next one;
// this roll becomes its Before. It closes this roll's folder.
func (r Roll) Next() Roll {
	if r.at != nil {
		_ = r.at.Close()
	}
	return Roll{Before: cmp.Or(r.Folder, r.Before), in: r.in}
}

// Close closes the folders. Rank 0 also removes the roll and the previous one.
func (r Roll) Close() {
	if r.at != nil {
		_ = r.at.Close() // nothing written through it must stay
	}
	if r.in != nil {
		r.remove(filepath.Base(r.Folder))
		r.remove(filepath.Base(r.Before))
		_ = r.in.Close()
	}
}

// remove removes a roll's folder as far as possible. It ignores errors, since nobody needs the
// files.
func (r Roll) remove(name string) {
	if !strings.HasPrefix(name, prefix) {
		return
	}
	if st, err := r.in.Lstat(name); err == nil && r.own(name, st) == nil {
		_ = filesys.RemoveAll(r.in, name)
	}
}

// open opens a file of the roll.
func (r Roll) open(name string, flag int) (filesys.File, error) {
	if r.at == nil {
		return nil, fs.ErrNotExist
	}
	f, err := r.at.OpenFile(name, flag|filesys.NoWait, 0)
	if errors.Is(err, syscall.ESTALE) { // a network file system's error for a removed folder
		err = &fs.PathError{Op: "open", Path: filepath.Join(r.at.Path(), name), Err: fs.ErrNotExist}
	}
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil {
		err = r.own(f.Name(), st)
	}
	if err == nil && (!st.Mode.IsRegular() || st.Links > 1) {
		err = fmt.Errorf("%s is not a regular file with one name: its mode is %v, its hard links %d; remove it", f.Name(), st.Mode, st.Links)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// write replaces the contents of an existing file. The final newline marks the text as
// complete.
func (r Roll) write(name string, v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	f, err := r.open(name, os.O_WRONLY)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(append(text, '\n'), 0)
	return errors.Join(err, f.Close())
}

// read says whether a file has been written, and reads it into v.
func (r Roll) read(name string, v any) (bool, error) {
	f, err := r.open(name, os.O_RDONLY)
	if err != nil {
		return false, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxFile))
	if err != nil || !bytes.HasSuffix(text, []byte("\n")) {
		return false, err
	}
	return true, json.Unmarshal(text, v)
}

// Call is rank 0's part of a roll call. It waits until all ranks except the suspects, whose time is
// over, have answered, or until the longest delay has passed. Then decide makes the verdict from
// the ranks that answered and the lost ones. If the job ends, the roll is removed once the ranks
// that answered have read the verdict.
func (r Roll) Call(ctx context.Context, suspects []int, decide func(here, lost []int) Verdict) (Verdict, error) {
	if err := r.write("0", true); err != nil {
		return Verdict{}, fmt.Errorf("call the roll: %w", err)
	}
	late := time.Now().Add(r.Wait)
	for {
		last := time.Now().After(late) // before the look: a rank that has answered by then counts as here
		var here, lost []int
		unsure := false
		for rank := range r.Ranks {
			var yes bool
			ok, err := r.read(strconv.Itoa(rank), &yes)
			switch {
			case final(err, last):
				return Verdict{}, fmt.Errorf("call the roll: %w", err)
			case err != nil:
				unsure = true
			case ok && yes:
				here = append(here, rank)
			default:
				lost = append(lost, rank)
			}
		}
		if last || !unsure && !slices.ContainsFunc(lost, func(rank int) bool { return !slices.Contains(suspects, rank) }) {
			v := decide(here, lost)
			v.Lost = lost
			if err := r.write(verdictName, v); err != nil {
				return Verdict{}, fmt.Errorf("tell who goes on: %w", err)
			}
			if !v.On {
				r.heard(ctx, here)
				r.Close()
			}
			return v, nil
		}
		if err := pause(ctx); err != nil {
			return Verdict{}, err
		}
	}
}

// heard waits until the ranks that answered have withdrawn their answers, which they do after
// reading that the job ends.
func (r Roll) heard(ctx context.Context, here []int) {
	for late := time.Now().Add(min(r.Wait, hearing)); time.Now().Before(late); {
		waits := slices.ContainsFunc(here, func(rank int) bool {
			var yes bool
			ok, err := r.read(strconv.Itoa(rank), &yes)
			return rank > 0 && (!ok || err != nil || yes)
		})
		if !waits || pause(ctx) != nil {
			return
		}
	}
}

// Answer is another rank's part: it announces the rank and waits for the verdict. It first waits
// for rank 0's longest delay. Once rank 0 has started the roll call, it waits for the longest time
// that rank 0 may wait for others, plus a quarter. If a verdict exists already it announces
// nothing. The error is ErrNoVerdict if there is no verdict.
func (r Roll) Answer(ctx context.Context, rank int) (v Verdict, err error) {
	defer func() {
		if err == nil && !v.On {
			_ = r.write(strconv.Itoa(rank), false) // see heard; rank 0 waits only for a short time
		}
	}()
	late, leads := time.Now().Add(r.Wait+r.Wait/4), false
	if ok, err := r.read(verdictName, &v); ok || err != nil {
		return v, wrap(err)
	}
	if err := r.write(strconv.Itoa(rank), true); err != nil {
		return v, wrap(err)
	}
	for {
		last := time.Now().After(late)
		if ok, err := r.read(verdictName, &v); ok || final(err, last) {
			return v, wrap(err)
		}
		if !leads {
			if leads, err = r.read("0", new(bool)); final(err, last) {
				return v, wrap(err)
			}
			if leads {
				late, last = time.Now().Add(r.Wait+r.Wait/4), false
			}
		}
		if last {
			return v, ErrNoVerdict
		}
		if err := pause(ctx); err != nil {
			return v, err
		}
	}
}

// final says whether an error ends the roll call: if the folder is gone, or at the last look. A
// network file system that also lost a host may fail once and then recover.
func final(err error, last bool) bool {
	return err != nil && (last || errors.Is(err, fs.ErrNotExist))
}

// wrap adds to an error that it occurred while answering.
func wrap(err error) error {
	if err != nil {
		return fmt.Errorf("answer the roll call: %w", err)
	}
	return nil
}

func pause(ctx context.Context) error {
	select {
	case <-time.After(lookEvery):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
