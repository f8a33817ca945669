// Package rollcall is how the processes of a job that has lost some agree on who is left, by
// files in a folder that all of them see: what carried their messages is what has failed.
//
//	a process that is left   writes its own file              reads the verdict
//	rank 0                   reads all, waits for the silent  writes the verdict
//
// Each file is there, empty, before anybody looks for it, and is opened anew at every look:
// so a network file system shows what another host has written (close-to-open consistency,
// and no name that is remembered as missing). Whoever is late finds the verdict all the same,
// and that it is without him.
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
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Roll is where the processes of a job answer. The zero value is of a job that calls none.
type Roll struct {
	Folder string // absolute
	Ranks  int
	// Wait is how much later than another a process may come to the roll call: the longest
	// wait of a collective, and what an end takes.
	Wait time.Duration
	// Before is the folder of the roll call by which the job has these ranks, "" for none:
	// who was late then may still look there.
	Before string
}

// Verdict is what rank 0 has decided.
type Verdict struct {
	On   bool   // the job goes on; else it ends, and Why says why
	Go   []int  // who goes on, in ascending order; others that answered are not needed
	Lost []int  // who did not answer
	Why  string // in words
}

const (
	prefix      = ".spillway-roll-"
	verdictName = "verdict"
	lookEvery   = 20 * time.Millisecond
	hearing     = 3 * time.Second // the most that a verdict which ends the job waits for those that are here
)

// ErrNoVerdict is of a roll call whose rank 0 has said nothing.
var ErrNoVerdict = errors.New("rank 0 has not said who goes on")

// Open makes the roll of a job of so many ranks below dir, and removes what earlier jobs have
// left there, but for the roll that the job had before, which a Roll without a folder names
// too.
func Open(dir string, ranks int, wait time.Duration, before Roll) (Roll, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return Roll{}, err
	}
	old, err := os.ReadDir(dir)
	if err != nil {
		return Roll{}, err
	}
	last := cmp.Or(before.Folder, before.Before)
	for _, f := range old {
		if path := filepath.Join(dir, f.Name()); path != last {
			remove(path)
		}
	}
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails: the process ends where the system has no randomness
	r := Roll{filepath.Join(dir, prefix+hex.EncodeToString(b[:])), ranks, wait, last}
	if err := os.Mkdir(r.Folder, 0o777); err != nil {
		return Roll{}, err
	}
	names := []string{verdictName}
	for rank := range ranks {
		names = append(names, strconv.Itoa(rank))
	}
	for _, name := range names {
		if err := os.WriteFile(filepath.Join(r.Folder, name), nil, 0o666); err != nil {
			r.Close()
			return Roll{}, err
		}
	}
	return r, nil
}

// Close removes the roll and the one before it.
func (r Roll) Close() {
	remove(r.Folder)
	remove(r.Before)
}

// remove removes a roll's folder, as far as that can be done: nobody needs what is there.
func remove(path string) {
	if strings.HasPrefix(filepath.Base(path), prefix) {
		_ = os.RemoveAll(path)
	}
}

// write puts a value into a file that is there. Its last byte is a line's end: what lacks it
// is not all there yet.
func (r Roll) write(name string, v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(r.Folder, name), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.Write(append(text, '\n'))
	return errors.Join(err, f.Close())
}

// read tells whether somebody has written to a file, and what.
func (r Roll) read(name string, v any) (bool, error) {
	text, err := os.ReadFile(filepath.Join(r.Folder, name))
	if err != nil || !bytes.HasSuffix(text, []byte("\n")) {
		return false, err
	}
	return true, json.Unmarshal(text, v)
}

// Call is rank 0's part: it waits until all ranks have answered but for the suspects, who
// have had their time, or as long as one may be behind, and has decide say what
// becomes of those that are here and those that are lost. Where that is that the job ends,
// the roll is gone once those that are here have heard it.
func (r Roll) Call(ctx context.Context, suspects []int, decide func(here, lost []int) Verdict) (Verdict, error) {
	if err := r.write("0", true); err != nil {
		return Verdict{}, fmt.Errorf("call the roll: %w", err)
	}
	late := time.Now().Add(r.Wait)
	for {
		last := time.Now().After(late) // before the look: who has answered by then is here
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

// heard waits until those that are here have taken back that they are, which they do when
// they have read that the job ends.
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

// Answer is another rank's part: it says that it is here, and waits for the verdict: as long
// as rank 0 may be behind, and once that is here as long as it may wait for others, and a
// quarter more. Nothing is said where there is a verdict already. ErrNoVerdict: there is none.
func (r Roll) Answer(ctx context.Context, rank int) (v Verdict, err error) {
	defer func() {
		if err == nil && !v.On {
			_ = r.write(strconv.Itoa(rank), false) // see heard; rank 0 waits a while only
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

// final says whether an error of a look ends the roll call: where the folder is gone, and at
// the last look. A network file system may fail once where it has lost a host as well.
func final(err error, last bool) bool {
	return err != nil && (last || errors.Is(err, fs.ErrNotExist))
}

// wrap says of what an error is.
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
