package rollcall

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const minute = time.Minute

// all goes on with everybody who is here.
func all(here, _ []int) Verdict { return Verdict{On: true, Go: here} }

// Everybody hears the one verdict, at once where only those are silent that have had their
// time, and a late one hears that it is without him.
func TestAllHearOneVerdict(t *testing.T) {
	r, err := Open(t.TempDir(), 4, minute, Roll{})
	require.NoError(t, err)
	var wg sync.WaitGroup
	heard := make([]Verdict, 4)
	for _, rank := range []int{1, 3} {
		wg.Go(func() {
			v, err := r.Answer(context.Background(), rank)
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
	late, err := r.Answer(context.Background(), 2)
	require.NoError(t, err)
	require.Equal(t, want, late)
	r.Close()
	_, err = os.Stat(r.Folder)
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = r.Answer(context.Background(), 2)
	require.ErrorIs(t, err, os.ErrNotExist)
}

// A verdict that the job ends is heard by all that are here, and then nothing is left; who
// answered and has died since is not waited for longer than one waits.
func TestAnEndLeavesNothing(t *testing.T) {
	for _, dead := range []bool{false, true} {
		dir := t.TempDir()
		r, err := Open(dir, 4, minute, Roll{})
		require.NoError(t, err)
		answering := []int{1, 3}
		if dead {
			require.NoError(t, r.write("3", true))
			answering = answering[:1]
		}
		heard := make(chan error, len(answering))
		for _, rank := range answering {
			go func() {
				v, err := r.Answer(context.Background(), rank)
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

// Ranks that nobody suspects are waited for, and no longer than that.
func TestWhoDoesNotAnswerIsLost(t *testing.T) {
	r, err := Open(t.TempDir(), 5, 300*time.Millisecond, Roll{})
	require.NoError(t, err)
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

// Without rank 0 there is no verdict; half a verdict is none; a canceled wait ends.
func TestNoVerdict(t *testing.T) {
	r, err := Open(t.TempDir(), 3, 40*time.Millisecond, Roll{})
	require.NoError(t, err)
	_, err = r.Answer(context.Background(), 1)
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

// A new roll takes the place of what an earlier job has left, and of nothing else.
func TestOpenRemovesWhatWasLeft(t *testing.T) {
	dir := t.TempDir()
	old, err := Open(dir, 2, minute, Roll{})
	require.NoError(t, err)
	other := filepath.Join(dir, "step-00000001")
	require.NoError(t, os.Mkdir(other, 0o700))
	r, err := Open(dir, 3, minute, Roll{})
	require.NoError(t, err)
	require.NoDirExists(t, old.Folder)
	require.DirExists(t, other)
	require.NotEqual(t, old.Folder, r.Folder)
	next, err := Open(dir, 2, minute, r)
	require.NoError(t, err)
	require.DirExists(t, r.Folder)
	again, err := Open(dir, 2, minute, Roll{Before: r.Folder}) // of a job that has lost more before it had a roll
	require.NoError(t, err)
	require.DirExists(t, r.Folder)
	require.Equal(t, r.Folder, again.Before)
	require.NoDirExists(t, next.Folder)
	again.Close()
	require.NoDirExists(t, again.Folder)
	require.NoDirExists(t, r.Folder)
	Roll{Folder: other}.Close()
	Roll{}.Close()
	require.DirExists(t, other)
	_, err = Open(filepath.Join(dir, "none"), 3, minute, Roll{})
	require.ErrorIs(t, err, os.ErrNotExist)
}

// A look that fails once, as a network file system's may, ends no roll call; one that fails to
// the end does.
func TestALookThatFails(t *testing.T) {
	r, err := Open(t.TempDir(), 2, minute, Roll{})
	require.NoError(t, err)
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
	_, err = r.Call(t.Context(), nil, func(_, _ []int) Verdict { return Verdict{} })
	require.ErrorContains(t, err, "call the roll: ")
}

// waitFor returns once a file has something in it.
func waitFor(t *testing.T, path string) {
	t.Helper()
	require.Eventually(t, func() bool {
		text, err := os.ReadFile(path)
		return err == nil && len(text) > 0
	}, time.Minute, time.Millisecond)
}
