package train

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/internal/testkit/folders"
)

// TestSavesBesideTheStepsAreTheSame checks that checkpoints written in the background equal those
// of synchronous saves, and are confirmed and kept alike.
func TestSavesBesideTheStepsAreTheSame(t *testing.T) {
	for name, change := range map[string]func(*request){
		"fp32":            func(c *request) { c.Ranks, c.Zero = 3, 3 },
		"moments on disk": func(c *request) { c.Ranks, c.Offload, c.Disk = 2, "optimizer=disk", scratch(t) },
		"8 bits":          func(c *request) { c.Ranks, c.Zero, c.Int8 = 2, 1, []string{"optimizer"} },
	} {
		t.Run(name, func(t *testing.T) {
			var bits [2]outcome
			var held [2]map[string]map[string]string
			for i, mode := range []string{config.AsyncOff, config.AsyncOn} {
				c := tiny("gpt2")
				c.Steps, c.SaveEvery, c.Keep = 5, 1, 3
				change(&c)
				c.AsyncSave, c.Checkpoint = mode, scratch(t)
				bits[i] = runOf(t, c)
				list, err := checkpoint.List(c.Checkpoint)
				require.NoError(t, err)
				require.Len(t, list, 4, "three confirmed ones, and the last")
				held[i] = map[string]map[string]string{}
				for _, folder := range list {
					held[i][filepath.Base(folder)] = files(t, folder)
				}
			}
			require.Equal(t, bits[0], bits[1])
			require.Equal(t, held[0], held[1])
		})
	}
}

// TestStagingIsInThePlan checks that saves become synchronous if memory has no room for staging. If
// AsyncSave is on, the plan does not fit instead.
func TestStagingIsInThePlan(t *testing.T) {
	c := tiny("gpt2")
	c.Ranks, c.Checkpoint = 2, scratch(t)
	p, err := c.planned().Plan(t.Context())
	require.NoError(t, err)
	require.Positive(t, p.Config.Staging)
	var states int64
	for i := range p.Program.Params {
		states += 3 * 4 * p.Program.Params[i].Elems()
	}
	require.GreaterOrEqual(t, 2*p.Config.Staging, states)
	require.Less(t, 2*p.Config.Staging, states+states/4)
	need := p.Layout.Spaces[graph.Host].Peak + p.Config.Outside[graph.Host]
	c.HostMemory = need
	p, err = c.planned().Plan(t.Context())
	require.NoError(t, err)
	require.Positive(t, p.Config.Staging)

	c.HostMemory--
	p, err = c.planned().Plan(t.Context())
	require.NoError(t, err, "auto fits without")
	require.Zero(t, p.Config.Staging)
	require.Less(t, p.Config.Outside[graph.Host], need)
	c.AsyncSave = config.AsyncOn
	_, err = c.planned().Plan(t.Context())
	require.ErrorContains(t, err, "does not fit")
	c.AsyncSave, c.HostMemory = config.AsyncOff, 0
	p, err = c.planned().Plan(t.Context())
	require.NoError(t, err)
	require.Zero(t, p.Config.Staging)
	c.AsyncSave, c.Checkpoint = config.AsyncOn, ""
	p, err = c.planned().Plan(t.Context())
	require.NoError(t, err)
	require.Positive(t, p.Config.Staging, "a plan tells what it would take")
	_, err = c.start(context.Background())
	require.ErrorContains(t, err, "needs Config.Checkpoint")
	c.AsyncSave = "later"
	require.ErrorContains(t, c.Validate(), "Config.AsyncSave")
}

// heldSyncs opens folders whose syncs wait while a gate is set.
type heldSyncs struct {
	mu   sync.Mutex
	gate chan struct{}
}

type heldFolder struct {
	filesys.Folder
	of *heldSyncs
}

func (h heldFolder) Sub(name string) (filesys.Folder, error) {
	f, err := h.Folder.Sub(name)
	return heldFolder{f, h.of}, err
}

func (h *heldSyncs) hold() (release func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.gate = make(chan struct{})
	return sync.OnceFunc(func() { close(h.gate) })
}

func (h *heldSyncs) wait() {
	h.mu.Lock()
	held := h.gate
	h.mu.Unlock()
	if held != nil {
		<-held
	}
}

func (h heldFolder) OpenFile(name string, flag int, perm os.FileMode) (filesys.File, error) {
	f, err := h.Folder.OpenFile(name, flag, perm)
	if err != nil {
		return nil, err
	}
	return &heldFile{f, h.of}, nil
}

func (h heldFolder) Sync() error {
	h.of.wait()
	return h.Folder.Sync()
}

type heldFile struct {
	filesys.File
	of *heldSyncs
}

func (f *heldFile) Sync() error {
	f.of.wait()
	return f.File.Sync()
}

// TestStepsDoNotWaitForTheDisk checks that steps wait for no sync: neither of a save, nor of its
// confirmation and the removals after it. Only the next save waits.
func TestStepsDoNotWaitForTheDisk(t *testing.T) {
	dir := scratch(t)
	h := &heldSyncs{}
	disk := folders.At(heldFolder{folders.NewMemory(dir).Folder(), h})
	c := tiny("gpt2")
	c.folders = disk
	c.Steps, c.SaveEvery, c.Keep, c.AsyncSave, c.Checkpoint = 7, 2, 1, config.AsyncOn, filepath.Join(dir, "ck")
	release := func() {}
	require.NoError(t, func() error {
		tr, err := c.start(context.Background())
		if err != nil {
			return err
		}
		err = tr.Run(context.Background(), func(r StepResult) error {
			switch r.Step {
			case 2: // the save of step 2 begins after this
				release = h.hold()
			case 4: // two steps have passed during that save; the save of step 4 would wait for it
				require.Empty(t, stepsIn(t, disk, c.Checkpoint))
				release()
				tr.saver.Idle()
				release = h.hold() // now the save of step 2 is confirmed
				require.NoError(t, tr.settle(false))
				require.Equal(t, []int{2}, stepsIn(t, disk, c.Checkpoint))
			case 5:
				release()
			}
			return nil
		})
		return errors.Join(err, tr.Close())
	}())
	require.Equal(t, []int{6, 7}, stepsIn(t, disk, c.Checkpoint))
}

// stepsIn returns the steps of a folder's checkpoints.
func stepsIn(t *testing.T, disk filesys.Opener, folder string) (steps []int) {
	t.Helper()
	d, err := checkpoint.OpenDir(disk, folder)
	require.NoError(t, err)
	list, err := d.Scan()
	require.NoError(t, errors.Join(err, d.Close()))
	for _, e := range list {
		steps = append(steps, e.Step)
	}
	return steps
}

// TestASaveBesideTheStepsFails checks that a failed background save is reported and retried.
func TestASaveBesideTheStepsFails(t *testing.T) {
	c := tiny("gpt2")
	c.Steps, c.SaveEvery, c.AsyncSave, c.Checkpoint = 3, 1, config.AsyncOn, filepath.Join(scratch(t), "ck")
	var told []string
	c.Warn = func(line string) { told = append(told, line) }
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	require.NoError(t, tr.Run(context.Background(), func(r StepResult) error {
		switch r.Step {
		case 1: // the next save has no folder to write to
			require.NoError(t, os.RemoveAll(c.Checkpoint))
			require.NoError(t, os.WriteFile(c.Checkpoint, nil, 0o644))
		case 2:
			tr.saver.Idle() // wait until the save has failed
			require.NoError(t, os.Remove(c.Checkpoint))
		}
		return nil
	}))
	require.NoError(t, tr.Close())
	require.Len(t, told, 2, "%v", told)
	require.Contains(t, told[0], "training goes on")
	require.Contains(t, told[1], "saved now")
	list, err := checkpoint.List(c.Checkpoint)
	require.NoError(t, err)
	require.Equal(t, "step-00000003", filepath.Base(list[len(list)-1]))
}

// TestStatesMoveByteForByte checks that states keep every byte when a run moves to other ranks,
// stages and placements.
func TestStatesMoveByteForByte(t *testing.T) {
	for name, change := range map[string]func(*request){
		"fp32": func(*request) {}, "fp16": func(c *request) { c.Precision = "fp16" }, "8 bits": func(c *request) { c.Int8 = []string{"optimizer"} },
		"bf16 states": func(c *request) { c.Precision, c.OptimizerDType, c.StochasticRounding = "bf16", "bf16", true },
	} {
		t.Run(name, func(t *testing.T) {
			c := tiny("gpt2")
			c.Steps, c.Ranks, c.Zero, c.Checkpoint = 2, 1, 0, scratch(t)
			change(&c)
			runOf(t, c)
			list, err := checkpoint.List(c.Checkpoint)
			require.NoError(t, err)
			want := files(t, list[0])
			for _, to := range []struct {
				ranks, zero int
				offload     string
			}{{8, 3, ""}, {3, 1, "optimizer=host"}, {4, 2, ""}, {1, 3, ""}} {
				c.Ranks, c.Zero, c.Offload, c.Resume = to.ranks, to.zero, to.offload, true
				tr, err := c.start(context.Background())
				require.NoError(t, err)
				touched, planned := tr.ranks.Memory()
				for sp := range graph.NumSpaces {
					for r := range touched[sp] {
						require.LessOrEqual(t, touched[sp][r], planned[sp][r])
					}
				}
				folder, err := tr.Save(context.Background())
				require.NoError(t, err)
				require.NoError(t, tr.Close())
				require.Equal(t, want, files(t, folder), fmt.Sprint(to))
			}
		})
	}
}
