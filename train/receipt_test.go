//go:build linux

package train

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/receipt"
	"github.com/spillway-ml/spillway/train/receipts"
)

// withReceipt runs c with a receipt and returns the receipt's text.
func withReceipt(t testing.TB, c request) []byte {
	t.Helper()
	c.Receipt = filepath.Join(t.TempDir(), "receipt")
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	require.NoError(t, tr.Run(context.Background(), nil))
	require.NoError(t, tr.Close())
	text, err := os.ReadFile(c.Receipt)
	require.NoError(t, err)
	chain, err := receipt.Read(filesys.System, c.Receipt)
	require.NoError(t, err)
	require.NoError(t, chain.Torn)
	require.Equal(t, c.Steps, chain.Lines[len(chain.Lines)-1].Step)
	require.NoError(t, chain.Close())
	return text
}

// TestReceiptsAreTheSame checks that a reproducible run writes the same receipt, byte for byte, at
// every number of ranks, stage and placement. This includes states split between ranks within a
// range.
func TestReceiptsAreTheSame(t *testing.T) {
	t.Parallel()
	c := tiny("gpt2")
	c.Steps, c.Seq, c.Batch, c.GlobalBatch, c.Reproducible, c.ReceiptEvery, c.Clip = 3, 16, 1, 6, true, 2, 1
	want := withReceipt(t, c)
	for i, change := range []func(*request){
		func(c *request) { c.Ranks, c.Zero = 2, 1 },
		func(c *request) {
			c.Ranks, c.Zero, c.Offload, c.Disk = 3, 3, "optimizer=disk,parameters=host", scratch(t)
		},
		func(c *request) { c.Ranks, c.Zero, c.RankShares = 4, 2, []int{1, 2, 1, 2} },
		func(c *request) { c.Zero, c.Recompute, c.Offload = 0, "full", "optimizer=host" },
	} {
		d := c
		change(&d)
		require.Equal(t, string(want), string(withReceipt(t, d)), i)
	}
	d := c
	d.Seed = 2
	require.NotEqual(t, string(want), string(withReceipt(t, d)))
}

// stepsOf returns the steps of a receipt's lines; lines of a start or resume are negative.
func stepsOf(t testing.TB, path string) (steps []int) {
	for _, r := range recordsOf(t, path) {
		if r.Run != nil {
			r.Step = -r.Step
		}
		steps = append(steps, r.Step)
	}
	return steps
}

// TestAResumedRunGoesOnInItsReceipt checks that a resumed run continues its receipt. Lines after
// its checkpoint and a line cut off are replaced. A receipt first requested at a resume begins
// there.
func TestAResumedRunGoesOnInItsReceipt(t *testing.T) {
	t.Parallel()
	c := in(keeping(t, 6), scratch(t))
	c.SaveEvery, c.Reproducible, c.GlobalBatch = 2, true, 4
	ended(t, c)
	require.Equal(t, []int{0, 2, 4, 6}, stepsOf(t, c.Receipt))
	require.NoError(t, os.RemoveAll(newestOf(t, c.Checkpoint).Folder))
	last := recordsOf(t, c.Receipt)[3]
	f, err := os.OpenFile(c.Receipt, os.O_APPEND|os.O_WRONLY, 0)
	require.NoError(t, err)
	_, err = f.WriteString(`{"prev":"`)
	require.NoError(t, errors.Join(err, f.Close()))
	cut, err := VerifyReceipt(context.Background(), receipts.Verification{Checkpoint: c.Checkpoint, Change: placed(c)})
	require.NoError(t, err)
	require.Contains(t, cut.Cut, "cut off")

	c.Resume, c.Ranks, c.Steps, c.Keep = true, 1, 8, 1
	ended(t, c)
	require.Equal(t, []int{0, 2, 4, -4, 6, 8}, stepsOf(t, c.Receipt))
	lines := recordsOf(t, c.Receipt)
	require.Equal(t, &receipt.Left{Step: 6, Hash: receipt.HashOf(lineOf(t, last))}, lines[3].Run.Left)
	require.Equal(t, lines[2].Root, lines[3].Root)
	var missing []string
	got, err := VerifyReceipt(context.Background(), receipts.Verification{Checkpoint: c.Checkpoint, Change: placed(c), Tell: func(s receipts.Segment) {
		if s.Missing != "" {
			missing = append(missing, s.Missing)
		}
	}})
	require.NoError(t, err)
	require.Equal(t, []string{"the checkpoint of step 2 is not there any more", "the checkpoint of step 4 is not there any more"}, missing)
	require.Equal(t, 4, got.Checked, "the first two steps and the last two")

	c.Receipt, c.Steps = filepath.Join(scratch(t), "later"), 10
	ended(t, c)
	require.Equal(t, []int{-8, 10}, stepsOf(t, c.Receipt))
	got, err = VerifyReceipt(context.Background(), receipts.Verification{Checkpoint: c.Checkpoint, Change: placed(c)})
	require.NoError(t, err)
	require.Equal(t, c.Receipt, got.Receipt, "the newest checkpoint names it")
	require.Equal(t, 2, got.Checked)
}

// TestReceiptsThatAreRefused checks that a receipt of another run, a file that is no receipt, and a
// checkpoint with other states are refused.
func TestReceiptsThatAreRefused(t *testing.T) {
	t.Parallel()
	c := in(keeping(t, 2), scratch(t))
	ended(t, c)
	d := c
	d.Checkpoint = scratch(t)
	refused(t, d, "Config.Receipt", "holds the receipt of another run; give Config.Resume")
	d.Receipt = filepath.Join(scratch(t), "notes")
	require.NoError(t, os.WriteFile(d.Receipt, []byte("notes\n"), 0o644))
	refused(t, d, "Config.Receipt", "holds no receipt; give another file")
	d.Receipt, d.Metrics = c.Receipt+"2", c.Receipt+"2"
	refused(t, d, "Config.Receipt", "is the file of Config.Metrics too")
	d.Metrics, d.Device = "", "cuda"
	refused(t, d, "Config.Receipt with Config.Device cuda")

	other := in(keeping(t, 2), scratch(t))
	other.LR = 0.5
	ended(t, other)
	c.Resume, c.Checkpoint, c.Steps, c.LR = true, other.Checkpoint, 4, other.LR
	refused(t, c, "Config.Receipt", "after step 2 it has another", "go on from another checkpoint")
}

// TestReceiptsOverProcesses checks that each process hashes its own states and that the receipt
// equals that of one process.
func TestReceiptsOverProcesses(t *testing.T) {
	c := tiny("gpt2")
	c.Batch, c.Seq, c.Steps, c.Reproducible, c.GlobalBatch = 1, 16, 2, true, 4
	want := withReceipt(t, c)
	c.Receipt = filepath.Join(t.TempDir(), "receipt")
	c.Ranks = 4
	overProcesses(t, c, 2, 2, func(t testing.TB, c request) outcome { return runOf(t, c) })
	text, err := os.ReadFile(c.Receipt)
	require.NoError(t, err)
	require.Equal(t, string(want), string(text))
}

// TestAReceiptThatCannotBeWritten checks that a failed write to the receipt is warned about once.
// The run completes its steps and then returns the error.
func TestAReceiptThatCannotBeWritten(t *testing.T) {
	t.Parallel()
	c := tiny("gpt2")
	c.Steps, c.Seq, c.Receipt, c.ReceiptEvery = 4, 16, filepath.Join(t.TempDir(), "receipt"), 1
	var warned []string
	c.Warn = func(text string) { warned = append(warned, text) }
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	require.NoError(t, tr.receipt.Log.Chain.Close())
	err = tr.Run(context.Background(), nil)
	require.ErrorContains(t, err, "Config.Receipt: ")
	require.Equal(t, 4, tr.Done())
	require.Len(t, warned, 1)
	require.Contains(t, warned[0], "training goes on, and the next line has these steps too")
	_ = tr.Close() // the file is closed already
}

// fullDisk opens folders in which no folder can be created while full is set.
type fullDisk struct {
	filesys.Opener
	full *atomic.Bool
}

func (d fullDisk) Open(path string) (filesys.Folder, error) {
	f, err := d.Opener.Open(path)
	if err != nil {
		return nil, err
	}
	return fullFolder{f, d.full}, nil
}

type fullFolder struct {
	filesys.Folder
	full *atomic.Bool
}

func (f fullFolder) Sub(name string) (filesys.Folder, error) {
	sub, err := f.Folder.Sub(name)
	if err != nil {
		return nil, err
	}
	return fullFolder{sub, f.full}, nil
}

func (f fullFolder) Mkdir(name string, perm os.FileMode) error {
	if f.full.Load() {
		return &fs.PathError{Op: "mkdir", Path: name, Err: syscall.ENOSPC}
	}
	return f.Folder.Mkdir(name, perm)
}

// TestAFailedSaveIsNoCopys checks a run whose last saves failed. The run resumed from an earlier
// checkpoint must replace the receipt's later lines, although it sets no Config.Receipt. They are
// not those of a copied run.
func TestAFailedSaveIsNoCopys(t *testing.T) {
	for _, async := range []string{config.AsyncOff, config.AsyncOn} {
		t.Run(async, func(t *testing.T) {
			t.Parallel()
			c := in(keeping(t, 8), scratch(t))
			c.SaveEvery, c.AsyncSave, c.ReceiptEvery = 2, async, 1
			var full atomic.Bool
			c.folders = fullDisk{filesys.System, &full}
			tr, err := c.start(context.Background())
			require.NoError(t, err)
			require.ErrorIs(t, tr.Run(context.Background(), func(r StepResult) error {
				switch r.Step {
				case 5:
					require.NoError(t, tr.settle(true))
					full.Store(true)
				case 7:
					tr.saver.Idle() // the save of step 6 has failed
				}
				return nil
			}), syscall.ENOSPC)
			require.NoError(t, tr.Close())
			full.Store(false)
			path := c.Receipt
			require.Len(t, recordsOf(t, path), 9)
			require.True(t, recordsOf(t, path)[6].Saved)
			c.Receipt, c.ReceiptEvery, c.Resume = "", 0, true
			ended(t, c)
			require.Equal(t, []int{0, 1, 2, 3, 4, -4, 6, 8}, stepsOf(t, path))
			require.Equal(t, 8, recordsOf(t, path)[5].Run.Left.Step)
		})
	}
}

// TestAKilledSaveIsNoCopys simulates a run killed while a checkpoint was written in the background.
// It must resume although its receipt has lines after its last checkpoint. With synchronous saves
// such lines may be a copied run's, so the resume is refused.
func TestAKilledSaveIsNoCopys(t *testing.T) {
	for _, async := range []string{config.AsyncOff, config.AsyncOn} {
		t.Run(async, func(t *testing.T) {
			t.Parallel()
			c := in(keeping(t, 8), scratch(t))
			c.SaveEvery, c.AsyncSave, c.ReceiptEvery = 2, async, 1
			tr, err := c.start(context.Background())
			require.NoError(t, err)
			var killed []byte // the receipt while step 8 runs
			require.NoError(t, tr.Run(context.Background(), func(r StepResult) error {
				if r.Step == 8 {
					killed, err = os.ReadFile(c.Receipt)
				}
				return err
			}))
			require.NoError(t, tr.Close())
			require.NoError(t, os.WriteFile(c.Receipt, killed, 0o666))
			for range 2 { // the checkpoints of steps 6 and 8
				require.NoError(t, os.RemoveAll(newestOf(t, c.Checkpoint).Folder))
			}
			path := c.Receipt
			require.Equal(t, []int{0, 1, 2, 3, 4, 5, 6, 7}, stepsOf(t, path))
			c.Receipt, c.ReceiptEvery, c.Resume = "", 0, true
			if async == config.AsyncOff {
				refused(t, c, "those may be a copy's")
				return
			}
			ended(t, c)
			require.Equal(t, []int{0, 1, 2, 3, 4, -4, 6, 8}, stepsOf(t, path))
			for range 2 { // steps 6 and 8: a checkpoint followed by another is complete
				require.NoError(t, os.RemoveAll(newestOf(t, c.Checkpoint).Folder))
			}
			refused(t, c, "those may be a copy's")
		})
	}
}
