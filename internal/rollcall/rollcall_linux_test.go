package rollcall

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/internal/testkit/traced"
)

const minute = time.Minute

// call opens a roll in the folder dir.
func call(t *testing.T, dir string, ranks int, wait time.Duration, before Roll) Roll {
	t.Helper()
	in, err := filesys.Open(dir)
	require.NoError(t, err)
	r, err := Open(in, ranks, wait, before)
	require.NoError(t, err)
	return r
}

// other opens the same roll as another rank would.
func other(t *testing.T, r Roll) Roll {
	t.Helper()
	o, err := r.Enter(filesys.System, "")
	require.NoError(t, err)
	t.Cleanup(o.Close)
	return o
}

// all decides to continue with every rank that is present.
func all(here, _ []int) Verdict { return Verdict{On: true, Go: here} }

// All ranks get the same verdict. It comes immediately if only ranks whose time is over are silent.
// A late rank learns that the others continue without it.
func TestAllHearOneVerdict(t *testing.T) {
	r := call(t, t.TempDir(), 4, minute, Roll{})
	var wg sync.WaitGroup
	heard := make([]Verdict, 4)
	late := other(t, r)
	for _, rank := range []int{1, 3} {
		o := other(t, r)
		wg.Go(func() {
			v, err := o.Answer(context.Background(), rank)
			if err != nil {
				t.Error(err)
			}
			heard[rank] = v
		})
	}
	v, err := r.Call(context.Background(), []int{2}, func(here, lost []int) Verdict {
		require.Equal(t, []int{2}, lost)
		return Verdict{On: true, Go: here[:2], Why: "lost rank 2"}
	})
	require.NoError(t, err)
	wg.Wait()
	want := Verdict{On: true, Go: []int{0, 1}, Lost: []int{2}, Why: "lost rank 2"}
	require.Equal(t, want, v)
	require.Equal(t, want, heard[1])
	require.Equal(t, want, heard[3])
	told, err := late.Answer(context.Background(), 2)
	require.NoError(t, err)
	require.Equal(t, want, told)
	r.Close()
	_, err = os.Stat(r.Folder)
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = late.Answer(context.Background(), 2)
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = r.Enter(filesys.System, "")
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = Roll{}.Answer(context.Background(), 2)
	require.ErrorIs(t, err, os.ErrNotExist)
}

// A verdict that ends the job reaches all present ranks, and no file remains. A rank that answered
// and then died is waited for at most the usual time.
func TestAnEndLeavesNothing(t *testing.T) {
	for _, dead := range []bool{false, true} {
		dir := t.TempDir()
		r := call(t, dir, 4, minute, Roll{})
		answering := []int{1, 3}
		if dead {
			require.NoError(t, r.write("3", true))
			answering = answering[:1]
		}
		heard := make(chan error, len(answering))
		for _, rank := range answering {
			o := other(t, r)
			go func() {
				v, err := o.Answer(context.Background(), rank)
				if err == nil && v.Why != "too few" {
					err = ErrNoVerdict
				}
				heard <- err
			}()
		}
		for _, rank := range []string{"1", "3"} {
			for !slices.Equal([]byte("true\n"), contents(t, r, rank)) {
				time.Sleep(time.Millisecond)
			}
		}
		leads := r
		if dead {
			leads.Wait = 50 * time.Millisecond
		}
		v, err := leads.Call(context.Background(), []int{2}, func(here, lost []int) Verdict { return Verdict{Why: "too few"} })
		require.NoError(t, err)
		require.False(t, v.On)
		left, err := os.ReadDir(dir)
		require.NoError(t, err)
		require.Empty(t, left)
		for range answering {
			require.NoError(t, <-heard)
		}
	}
}

// Ranks that nobody suspects are waited for until the timeout, and then count as lost.
func TestWhoDoesNotAnswerIsLost(t *testing.T) {
	r := call(t, t.TempDir(), 5, 300*time.Millisecond, Roll{})
	answered := make(chan Verdict)
	go func() {
		patient := r
		patient.Wait = minute
		v, _ := patient.Answer(context.Background(), 3)
		answered <- v
	}()
	for !slices.Equal([]byte("true\n"), contents(t, r, "3")) {
		time.Sleep(time.Millisecond)
	}
	v, err := r.Call(context.Background(), []int{1}, all)
	require.NoError(t, err)
	require.Equal(t, Verdict{On: true, Go: []int{0, 3}, Lost: []int{1, 2, 4}}, v)
	require.Equal(t, v, <-answered)
}

func contents(t *testing.T, r Roll, name string) []byte {
	text, err := os.ReadFile(filepath.Join(r.Folder, name))
	require.NoError(t, err)
	return text
}

// Without rank 0, or with an incomplete verdict, there is no verdict. A canceled wait returns.
func TestNoVerdict(t *testing.T) {
	r := call(t, t.TempDir(), 3, 40*time.Millisecond, Roll{})
	_, err := r.Answer(context.Background(), 1)
	require.ErrorIs(t, err, ErrNoVerdict)
	require.NoError(t, os.WriteFile(filepath.Join(r.Folder, verdictName), []byte(`{"On":true`), 0o600))
	_, err = r.Answer(context.Background(), 1)
	require.ErrorIs(t, err, ErrNoVerdict)
	r.Wait = minute
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_, err = r.Answer(ctx, 1)
	require.ErrorIs(t, err, context.Canceled)
	_, err = r.Call(ctx, nil, all)
	require.ErrorIs(t, err, context.Canceled)
}

// A new roll replaces what an earlier job left, and nothing else.
func TestOpenRemovesWhatWasLeft(t *testing.T) {
	dir := t.TempDir()
	old := call(t, dir, 2, minute, Roll{})
	checkpoint := filepath.Join(dir, "step-00000001")
	require.NoError(t, os.Mkdir(checkpoint, 0o700))
	r := call(t, dir, 3, minute, Roll{})
	require.NoDirExists(t, old.Folder)
	require.DirExists(t, checkpoint)
	require.NotEqual(t, old.Folder, r.Folder)
	next := call(t, dir, 2, minute, r.Next().Next()) // from a job that lost more ranks before it had a roll
	require.DirExists(t, r.Folder)
	require.Equal(t, r.Folder, next.Before)
	next.Close()
	require.NoDirExists(t, next.Folder)
	require.NoDirExists(t, r.Folder)
	in, err := filesys.Open(dir)
	require.NoError(t, err)
	Roll{Folder: checkpoint, in: in}.Close()
	Roll{}.Close()
	require.DirExists(t, checkpoint)
}

// A roll stays in the folder that rank 0 opened, even if its path later leads elsewhere. Ranks that
// continue use the same folder.
func TestARollStaysInItsFolder(t *testing.T) {
	top := t.TempDir()
	a, b, link := filepath.Join(top, "a"), filepath.Join(top, "b"), filepath.Join(top, "l")
	require.NoError(t, errors.Join(os.Mkdir(a, 0o700), os.Mkdir(b, 0o700), os.Symlink("a", link)))
	r := call(t, link, 2, minute, Roll{})
	late := other(t, r)
	theirs := filepath.Join(b, filepath.Base(r.Folder)) // another folder's roll of the same name
	require.NoError(t, errors.Join(os.Mkdir(theirs, 0o700), os.Remove(link), os.Symlink("b", link)))
	go func() { _, _ = late.Answer(t.Context(), 1) }()
	v, err := r.Call(t.Context(), nil, all)
	require.NoError(t, err)
	require.Equal(t, []int{0, 1}, v.Go)
	in, err := filesys.Open(link)
	require.NoError(t, err)
	next := r.Next()
	_, err = Open(in, 2, minute, next)
	require.ErrorContains(t, err, "is another folder than the one that the job began in")
	next.Close()
	require.NoDirExists(t, filepath.Join(a, filepath.Base(r.Folder)))
	left, err := os.ReadDir(b)
	require.NoError(t, err)
	require.Len(t, left, 1)
	require.Equal(t, filepath.Base(theirs), left[0].Name())
}

// After the checkpoint folder is opened, no file of a roll is created, renamed or removed by path,
// by rank 0 or another rank. This holds also if an earlier job left a roll.
func TestNothingIsDoneByPath(t *testing.T) {
	if dir := os.Getenv("SPILLWAY_TEST_ROLL"); dir != "" {
		call(t, dir, 2, minute, Roll{})
		r := call(t, dir, 2, minute, Roll{})
		for range 2 {
			o := other(t, r)
			answered := make(chan error, 1)
			go func() {
				_, err := o.Answer(t.Context(), 1)
				answered <- err
			}()
			_, err := r.Call(t.Context(), nil, all)
			require.NoError(t, err)
			require.NoError(t, <-answered)
			r = call(t, dir, 2, minute, r.Next())
		}
		o := other(t, r)
		go func() { _, _ = o.Answer(t.Context(), 1) }()
		_, err := r.Call(t.Context(), nil, func([]int, []int) Verdict { return Verdict{Why: "the job ends"} })
		require.NoError(t, err)
		left, err := os.ReadDir(dir)
		require.NoError(t, err)
		require.Empty(t, left)
		return
	}
	cmd := exec.Command(os.Args[0], "-test.run", "^TestNothingIsDoneByPath$")
	cmd.Env = append(os.Environ(), "SPILLWAY_TEST_ROLL="+t.TempDir())
	require.Greater(t, traced.NothingByPath(t, cmd, `spillway-roll|"verdict"|"[01]"`), 20)
}

// Symlinks and other users' files are not followed, written or removed.
func TestWhatAnotherMadeIsRefused(t *testing.T) {
	dir, victim := t.TempDir(), t.TempDir()
	thesis := filepath.Join(victim, "thesis")
	require.NoError(t, os.WriteFile(thesis, []byte("a long work\n"), 0o600))
	require.NoError(t, os.Symlink(victim, filepath.Join(dir, prefix+"00"))) // as if an earlier job had left it
	r := call(t, dir, 3, 0, Roll{})
	o := other(t, r)
	require.NoFileExists(t, filepath.Join(dir, prefix+"00"))
	for name, plant := range map[string]func(string) error{
		"link":      func(path string) error { return os.Symlink(thesis, path) },
		"hard link": func(path string) error { return os.Link(thesis, path) },
		"pipe":      func(path string) error { return unix.Mkfifo(path, 0o600) },
		"user":      func(path string) error { return errors.Join(os.WriteFile(path, nil, 0o600), os.Chown(path, 65534, -1)) },
	} {
		if name == "user" && os.Geteuid() != 0 {
			continue // only root can give files to another user
		}
		for rank := range 2 {
			path := filepath.Join(r.Folder, strconv.Itoa(rank))
			require.NoError(t, errors.Join(os.Remove(path), plant(path)))
		}
		_, err := r.Call(t.Context(), nil, all)
		require.ErrorContains(t, err, "call the roll: ", name)
		_, err = o.Answer(t.Context(), 1)
		require.ErrorContains(t, err, "answer the roll call: ", name)
	}
	away := r
	away.Folder += "-away"
	require.NoError(t, errors.Join(os.Rename(r.Folder, away.Folder), os.Symlink(away.Folder, r.Folder)))
	_, err := r.Enter(filesys.System, "")
	require.ErrorIs(t, err, filesys.ErrLeads)
	require.NoError(t, errors.Join(os.Remove(r.Folder), os.Symlink(victim, r.Folder)))
	r.Close()
	text, err := os.ReadFile(thesis)
	require.NoError(t, err)
	require.Equal(t, "a long work\n", string(text))
	if os.Geteuid() == 0 {
		require.NoError(t, os.Chown(away.Folder, 65534, -1))
		_, err := away.Enter(filesys.System, "")
		require.ErrorContains(t, err, "belongs to user 65534")
		call(t, dir, 1, 0, Roll{}).Close()
		require.DirExists(t, away.Folder)
	}
}

// A read that fails once, as on a network file system, does not end a roll call. One that keeps
// failing does.
func TestALookThatFails(t *testing.T) {
	r := call(t, t.TempDir(), 2, minute, Roll{})
	defer r.Close()
	name := filepath.Join(r.Folder, "1")
	require.NoError(t, os.Remove(name))
	require.NoError(t, os.Mkdir(name, 0o700)) // reading it fails
	came := make(chan Verdict)
	go func() {
		v, err := r.Call(t.Context(), nil, func(here, lost []int) Verdict { return Verdict{On: true, Go: here} })
		if err != nil {
			v.Why = err.Error()
		}
		came <- v
	}()
	waitFor(t, filepath.Join(r.Folder, "0"))
	require.NoError(t, os.Remove(name))
	require.NoError(t, os.WriteFile(name, []byte("true\n"), 0o600))
	require.Equal(t, Verdict{On: true, Go: []int{0, 1}}, <-came)

	require.NoError(t, os.Remove(name))
	require.NoError(t, os.Mkdir(name, 0o700))
	r.Wait = 0
	_, err := r.Call(t.Context(), nil, func(_, _ []int) Verdict { return Verdict{} })
	require.ErrorContains(t, err, "call the roll: ")
}

// waitFor waits until a file is not empty.
func waitFor(t *testing.T, path string) {
	t.Helper()
	require.Eventually(t, func() bool {
		text, err := os.ReadFile(path)
		return err == nil && len(text) > 0
	}, time.Minute, time.Millisecond)
}
