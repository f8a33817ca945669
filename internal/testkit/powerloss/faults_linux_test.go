package powerloss

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/internal/testkit/folders"
	"github.com/spillway-ml/spillway/train"
)

// lastStep is of the runs whose operations fail.
const lastStep = 4

// trial is a run that goes on from a checkpoint of step 2, saves after steps 3 and 4
// and prunes, on a disk in memory.
type trial struct {
	base, ck string
	c        spillway.Config
	disk     *folders.Memory // as the runs find it
	sha      string          // of the parameters that all of them end in
	processes
}

// processes runs a configuration, in one process or several.
type processes func(t *testing.T, c spillway.Config, disk filesys.Opener) (sha string, err error)

// alone runs in this process.
func alone(t *testing.T, c spillway.Config, disk filesys.Opener) (sha string, err error) {
	tr, err := train.NewIn(background, c, disk)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, tr.Close()) }()
	if err := tr.Run(background, nil); err != nil {
		return "", err
	}
	return tr.ParamsSHA256()
}

// begin trains two steps, undisturbed.
func begin(t *testing.T, ranks int, async string, how processes) *trial {
	top := t.TempDir()
	x := &trial{base: filepath.Join(top, "disk"), c: small(t, top), processes: how}
	x.ck = filepath.Join(x.base, "ck")
	x.disk = folders.NewMemory(x.base)
	x.c.Checkpoint, x.c.Ranks, x.c.Zero, x.c.AsyncSave = x.ck, ranks, 3, async
	x.c.Keep, x.c.SaveEvery, x.c.Steps = 1, 1, 2
	_, err := x.run(t, x.disk.Folder())
	require.NoError(t, err)
	require.Equal(t, 2, x.newest(t, x.disk.Folder()))
	x.c.Resume, x.c.Steps = true, lastStep
	whole := x.disk.Clone()
	x.sha, err = x.run(t, whole.Folder())
	require.NoError(t, err)
	require.Equal(t, lastStep, x.newest(t, whole.Folder()))
	return x
}

// run runs on a disk.
func (x *trial) run(t *testing.T, on filesys.Folder) (sha string, err error) {
	return x.processes(t, x.c, folders.At(on))
}

// newest sees that everything that bears a checkpoint's name is whole, and returns
// the newest one's step.
func (x *trial) newest(t *testing.T, on filesys.Folder) int {
	c, err := (&story{ck: x.ck}).dir(folders.At(on)).Choose(background, nil)
	require.NoError(t, err)
	require.True(t, c.Found())
	require.Empty(t, c.Passed)
	return c.Step
}

// tidy opens the folder as the next run does, and sees that nothing half is left then.
func (x *trial) tidy(t *testing.T, on filesys.Folder) {
	disk := folders.At(on)
	s, err := checkpoint.Open(x.ck, checkpoint.Options{Folders: disk})
	require.NoError(t, err)
	require.NoError(t, s.Close())
	require.NoError(t, (&story{ck: x.ck}).tidy(disk))
}

// everyVar in the environment lets each operation fail; else it is one of some.
const everyVar = "SPILLWAY_TEST_EVERY_OPERATION"

// from is the first operation to fail and the distance to the next.
func from(first, stride int) (int, int) {
	if os.Getenv(everyVar) != "" {
		return 1, 1
	}
	return first, stride
}

// attempt is a run of which an operation failed.
type attempt struct {
	hit  string // that operation; "": there were fewer
	at   int    // its number
	sha  string
	err  error
	told string // the error and the warnings before it
	disk filesys.Folder
}

// attempt lets the n-th operation of a run fail.
func (x *trial) attempt(t *testing.T, trouble folders.Trouble, n int) attempt {
	disk := x.disk.Clone()
	f := &folders.Fault{At: n, Trouble: trouble}
	var warned []string
	var mu sync.Mutex
	x.c.Warn = func(text string) { mu.Lock(); defer mu.Unlock(); warned = append(warned, text) }
	sha, err := x.run(t, f.Folder(disk.Folder()))
	disk.Unlock() // its process has ended
	mu.Lock()
	defer mu.Unlock()
	return attempt{hit: f.Hit(), at: f.Failed(), sha: sha, err: err, told: fmt.Sprintf("%v; %s", err, strings.Join(warned, "; ")), disk: disk.Folder()}
}

// every fails operations in turn, from the first-th on, and returns how many runs
// ended in an error and how many there were. Some that fail are resumed to their end.
func (x *trial) every(t *testing.T, trouble folders.Trouble, first, stride int) (failed, all int) {
	first, stride = from(first, stride)
	for n := first; ; n += stride {
		a := x.attempt(t, trouble, n)
		if a.hit == "" {
			require.NoError(t, a.err)
			return failed, all
		}
		n = a.at // those before it need no room
		all++
		if a.err != nil {
			failed++
		}
		x.check(t, trouble, a, failed%4 == 0)
	}
}

// words are what an error says of its cause.
var words = map[folders.Trouble]string{folders.Broken: "input/output error", folders.Full: "no space left on device", folders.Short: "no space left on device"}

// check sees that a run of which an operation failed has lost nothing, and says what
// failed if it did not come to its end.
func (x *trial) check(t *testing.T, trouble folders.Trouble, a attempt, resume bool) {
	t.Helper()
	what := fmt.Sprintf("%s at %d, %s", trouble, a.at, a.hit)
	step := x.newest(t, a.disk)
	require.GreaterOrEqual(t, step, 2, "%s loses what was saved", what)
	if a.err == nil {
		require.Equal(t, x.sha, a.sha, what)
		require.Equal(t, lastStep, step, "%s: the run's end was not saved", what)
	} else {
		require.NotContains(t, a.told, "panic", what)
		if trouble != folders.Killed {
			require.Contains(t, a.told, words[trouble], what)
			require.Contains(t, a.told, x.ck, what)
		}
	}
	x.tidy(t, a.disk)
	if a.err != nil && resume {
		sha, err := x.run(t, a.disk)
		require.NoError(t, err, "resumed after %s", what)
		require.Equal(t, x.sha, sha, "resumed after %s", what)
	}
}

// File operations of a run that resumes, saves and prunes fail, once each, in each way:
// what was saved is not lost, nothing half is left, and the run ends in the same
// parameters, or says what failed and where and does so when it is resumed. So over one
// process, and over three, which here share this one.
func TestFileOperationsFail(t *testing.T) {
	for i, c := range []struct {
		name   string
		ranks  int
		async  string
		how    processes
		stride int
	}{
		{"one rank", 1, "off", alone, 43},
		{"two ranks, async", 2, "on", alone, 43},
		{"three processes", 3, "off", together, 151},
		{"three processes, async", 3, "on", together, 151},
	} {
		t.Run(c.name, func(t *testing.T) {
			x := begin(t, c.ranks, c.async, c.how)
			for k, trouble := range folders.Troubles {
				failed, all := x.every(t, trouble, 1+k+4*i, c.stride)
				t.Logf("%s: %d runs, %d ended in an error", trouble, all, failed)
				require.Positive(t, all)
			}
		})
	}
}
