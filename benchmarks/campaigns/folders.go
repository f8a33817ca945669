//go:build linux

package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// stage is the place of an attack: a run's folder, a link to it, another run's folder, and a folder
// of another user.
type stage struct {
	dir, link, other, victim string
	planted                  []string // files that the attack has put into dir
	mounts                   []string
}

// attack is a change of a checkpoint folder by somebody else, before a run or during it.
type attack struct {
	name   string
	flags  []string // of the run
	launch bool     // the run has two processes
	before func(*stage) error
	during func(*stage) error // once the run has written a checkpoint
	always func(*stage)       // repeatedly during the run
}

var attacks = []attack{
	{name: "the link leads to another run", during: (*stage).retarget},
	{name: "the same, asynchronous saves", flags: []string{"--async-save", "on"}, during: (*stage).retarget},
	{name: "the same, two processes", launch: true, during: (*stage).retarget},
	{name: "the same, all are kept", flags: []string{"--keep", "0"}, during: (*stage).retarget},
	{name: "renamed, a link to another run in its place", during: func(s *stage) error {
		return errors.Join(os.Rename(s.dir, s.dir+"-moved"), os.Symlink(s.other, s.dir))
	}},
	{name: "renamed, two processes", launch: true, during: func(s *stage) error {
		return errors.Join(os.Rename(s.dir, s.dir+"-moved"), os.Symlink(s.other, s.dir))
	}},
	{name: "renamed, an empty folder in its place", during: func(s *stage) error {
		return errors.Join(os.Rename(s.dir, s.dir+"-moved"), os.Mkdir(s.dir, 0o755))
	}},
	{name: "another run is mounted over it", during: func(s *stage) error { return s.mount(s.other, s.dir) }},
	{name: "its newest checkpoint is mounted over", during: func(s *stage) error {
		names := steps(s.dir)
		return s.mount(s.victim, filepath.Join(s.dir, last(names)))
	}},
	{name: "its newest checkpoint is a link", during: func(s *stage) error {
		name := last(steps(s.dir))
		return errors.Join(os.Rename(filepath.Join(s.dir, name), filepath.Join(s.dir, "aside")), s.plantLink(name))
	}},
	{name: "each temporary folder becomes a link", always: (*stage).swapTemporary},
	{name: "the same, two processes", launch: true, always: (*stage).swapTemporary},
	{name: "marks name a link", before: func(s *stage) error { return errors.Join(s.plantLink(temporary), s.plantMarks(temporary)) }},
	{name: "marks name a folder with a link", before: func(s *stage) error {
		return errors.Join(os.Mkdir(filepath.Join(s.dir, temporary), 0o777), s.plantLink(temporary+"/in"), s.plantMarks(temporary))
	}},
	{name: "marks name a folder that is swapped for a link", before: func(s *stage) error {
		inside := filepath.Join(s.dir, temporary)
		err := os.Mkdir(inside, 0o777)
		for i := range 3000 {
			err = errors.Join(err, os.WriteFile(filepath.Join(inside, fmt.Sprintf("a%05d", i)), nil, 0o666))
		}
		return errors.Join(err, s.plantMarks(temporary))
	}, always: func(s *stage) {
		if _, err := os.Stat(filepath.Join(s.dir, temporary, "a00050")); errors.Is(err, fs.ErrNotExist) {
			_ = os.Rename(filepath.Join(s.dir, temporary), filepath.Join(s.dir, "moved")) // it may be renamed already
			_ = os.Symlink(s.victim, filepath.Join(s.dir, temporary))
		}
	}},
	{name: "marks name a mount", before: func(s *stage) error {
		at := filepath.Join(s.dir, temporary)
		return errors.Join(os.Mkdir(at, 0o777), s.mount(s.victim, at), s.plantMarks(temporary))
	}},
	{name: "marks name a folder above", before: func(s *stage) error { return s.plantMarks("../victim") }},
	{name: "marks name another run's checkpoint", before: func(s *stage) error { return s.plantMarks("../other/step-00000002") }},
	{name: "the marks are a link", before: func(s *stage) error { return s.plantLink(".spillway-marks") }},
	{name: "the lock is a link", before: func(s *stage) error {
		s.planted = append(s.planted, ".spillway-lock")
		return os.Symlink(filepath.Join(s.victim, "thesis"), filepath.Join(s.dir, ".spillway-lock"))
	}},
	{name: "the lock is another file's name", before: func(s *stage) error {
		s.planted = append(s.planted, ".spillway-lock")
		return os.Link(filepath.Join(s.victim, "thesis"), filepath.Join(s.dir, ".spillway-lock"))
	}},
	{name: "an old checkpoint is a link", before: func(s *stage) error { return s.plantLink("step-00000001") }},
}

const temporary = ".writing-step-00000001-00000000000000000000000000000000"

func (s *stage) retarget() error {
	return errors.Join(os.Remove(s.link), os.Symlink(s.other, s.link))
}

func (s *stage) mount(what, at string) error {
	s.mounts = append(s.mounts, at)
	return unix.Mount(what, at, "", unix.MS_BIND, "")
}

func (s *stage) plantLink(name string) error {
	s.planted = append(s.planted, name)
	return os.Symlink(s.victim, filepath.Join(s.dir, name))
}

// plantMarks writes a line of marks according to which a folder belongs to a killed save.
func (s *stage) plantMarks(name string) error {
	s.planted = append(s.planted, ".spillway-marks", temporary)
	text := fmt.Sprintf(`{"event":"working","name":%q}`, name)
	line := fmt.Sprintf("%08x %s\n", crc32.Checksum([]byte(text), crc32.MakeTable(crc32.Castagnoli)), text)
	return os.WriteFile(filepath.Join(s.dir, ".spillway-marks"), []byte(line), 0o666)
}

func (s *stage) swapTemporary() {
	names, _ := filepath.Glob(filepath.Join(s.dir, ".writing-*")) // the pattern is valid
	for _, n := range names {
		if os.Rename(n, filepath.Join(s.dir, "taken-"+filepath.Base(n)[1:])) == nil {
			_ = os.Symlink(s.victim, n) // the run may have been faster
		}
	}
}

// tree returns the hash of all names and contents below a folder.
func tree(dir string) (string, error) {
	h := sha256.New()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		fmt.Fprintf(h, "%s %v\n", strings.TrimPrefix(path, dir), d.Type())
		if d.Type().IsRegular() {
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			_, _ = h.Write(text) // a hash never fails
		}
		return nil
	})
	return fmt.Sprintf("%x", h.Sum(nil)), err
}

// folders makes n attacks, at least one of each kind, and checks the changes.
func (c *campaign) folders(ctx context.Context) error {
	failed, refused, done, missed := 0, 0, 0, 0
	for i := 0; i < max(c.n, len(attacks)) && ctx.Err() == nil; i++ {
		a := attacks[i%len(attacks)]
		status, err := c.attacked(ctx, a, i)
		if errors.Is(err, unix.EPERM) {
			missed++
			fmt.Printf("%s: not done, mounts are for root\n", a.name)
			continue
		}
		done++
		if status != 0 {
			refused++
		}
		fmt.Printf("%s: the run ended with status %d\n", a.name, status)
		if err != nil {
			failed++
			fmt.Printf("WRONG: %v\n", err)
		}
	}
	fmt.Printf("%d attacks, %d not done; %d ended the run or were refused, %d changed something or left a folder of no use\n",
		done, missed, refused, failed)
	if failed > 0 {
		return errors.New("attacks had an effect")
	}
	return nil
}

func (c *campaign) attacked(ctx context.Context, a attack, i int) (status int, err error) {
	at := c.path(fmt.Sprint("stage-", i))
	s := &stage{dir: filepath.Join(at, "ck"), link: filepath.Join(at, "link"), other: filepath.Join(at, "other"), victim: filepath.Join(at, "victim")}
	err = errors.Join(os.Mkdir(at, 0o755), os.Mkdir(s.dir, 0o755), os.Symlink("ck", s.link), os.Mkdir(s.victim, 0o755),
		os.WriteFile(filepath.Join(s.victim, "thesis"), []byte("years of work"), 0o600))
	if err != nil {
		return 0, err
	}
	if r := c.spillway(ctx, c.train("--steps", "4", "--save-every", "2", "--seed", "9", "--checkpoint", s.other)...); r.status != 0 {
		return r.status, fmt.Errorf("the other run: %s", short(r.err))
	}
	defer func() {
		for _, m := range s.mounts {
			err = errors.Join(err, unix.Unmount(m, unix.MNT_DETACH))
		}
		err = errors.Join(err, os.RemoveAll(at))
	}()
	others, err := tree(s.other)
	victims, verr := tree(s.victim)
	if err = errors.Join(err, verr); err != nil {
		return 0, err
	}
	if a.before != nil {
		if err := a.before(s); err != nil {
			return 0, err
		}
	}
	run := c.train(append([]string{"--steps", "300", "--save-every", "3", "--keep", "1", "--checkpoint", s.link}, a.flags...)...)
	if a.launch {
		run = append([]string{"launch", "-n", "2", "--"}, run...)
	}
	ended := make(chan ran, 1)
	go func() { ended <- c.spillway(ctx, run...) }()
	var r ran
	for acted := a.during == nil; ; {
		select {
		case r = <-ended:
		case <-time.After(100 * time.Microsecond):
			if !acted && len(steps(s.dir)) > 0 {
				acted = true
				if err := a.during(s); err != nil {
					<-ended
					return 0, err
				}
			}
			if a.always != nil {
				a.always(s)
			}
			continue
		}
		break
	}
	nowOthers, err := tree(s.other)
	nowVictims, verr := tree(s.victim)
	if err = errors.Join(err, verr); err == nil && nowOthers != others {
		err = errors.New("the other run's folder has changed")
	}
	if err == nil && nowVictims != victims {
		err = errors.New("a folder outside has changed")
	}
	if r.late || r.status < 0 {
		err = errors.Join(err, fmt.Errorf("the run ended with status %d, late: %v", r.status, r.late))
	}
	return r.status, errors.Join(err, c.honest(ctx, s))
}

// honest removes the leftovers of the attack, and runs in the same folder.
func (c *campaign) honest(ctx context.Context, s *stage) error {
	for _, m := range s.mounts {
		if err := unix.Unmount(m, unix.MNT_DETACH); err != nil {
			return err
		}
	}
	s.mounts = nil
	dir := s.dir
	if _, err := os.Stat(dir + "-moved"); err == nil {
		dir += "-moved"
	}
	for _, name := range steps(dir) { // links that a run has used as its own folders
		if st, err := os.Lstat(filepath.Join(dir, name)); err == nil && st.Mode()&fs.ModeSymlink != 0 {
			s.planted = append(s.planted, name)
		}
	}
	for _, name := range s.planted {
		if err := os.RemoveAll(filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	if r := c.spillway(ctx, c.train("--steps", "310", "--save-every", "5", "--keep", "1", "--resume", "--checkpoint", dir)...); r.status != 0 {
		return fmt.Errorf("an honest run in the folder: status %d: %s", r.status, short(r.err))
	}
	return nil
}
