package train

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/data"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/kernels/cpu/level"
	"github.com/spillway-ml/spillway/receipt"
	"github.com/spillway-ml/spillway/run"
	"github.com/spillway-ml/spillway/train/receipts"
)

// placed returns a function for Verification.Change that sets the ranks, stage and placement of v.
func placed(v request) func(*config.Config) {
	return func(c *config.Config) {
		c.Model, c.Data = v.Model, v.Data
		c.Ranks, c.Tensor, c.Zero, c.Threads, c.Prefetch = v.Ranks, v.Tensor, v.Zero, v.Threads, v.Prefetch
		c.Recompute, c.Offload, c.Disk, c.DeviceMemory = v.Recompute, v.Offload, v.Disk, v.DeviceMemory
	}
}

// in makes a run write its checkpoints and receipt to a folder.
func in(c request, dir string) request {
	c.Checkpoint, c.Receipt = filepath.Join(dir, "run"), filepath.Join(dir, "receipt")
	return c
}

// kept sets the receipt's lines to every one or two steps and a checkpoint to every two, and keeps
// all of them.
func kept(c request, r *rand.Rand) request {
	c.Steps, c.SaveEvery, c.ReceiptEvery = 5+r.IntN(3), 2, 1+r.IntN(2)
	return c
}

// honestCase returns a random run and a variant that must compute the same bits.
func honestCase(t testing.TB, seed uint64, dir string) (c, again request) {
	c = randomCase(t, seed, dir)
	r := rand.New(rand.NewPCG(seed, 31))
	c.poison = false
	c.Precision = []string{"fp32", "fp32", "fp16", "bf16"}[r.IntN(4)]
	c.Reproducible = r.IntN(2) == 0
	c.Zero = r.IntN(4)
	again = c
	switch {
	case c.Reproducible:
		again.Ranks, again.GlobalBatch = 1+r.IntN(min(6, c.Ranks*c.Accum)), c.StepRows()
		again.Zero = r.IntN(4)
	case c.Accum == 1:
		again.Zero = r.IntN(4)
	default:
		again.Zero = c.Zero/2*2 + r.IntN(2)
	}
	again = variant(t, r, again)
	return kept(c, r), again
}

func verified(t testing.TB, c, again request) int {
	t.Helper()
	got, err := VerifyReceipt(context.Background(), receipts.Verification{Checkpoint: c.Checkpoint, Change: placed(again)})
	if errors.Is(err, ErrDoesNotFit) && again.DeviceMemory > 0 { // the cap was chosen for another plan
		again.DeviceMemory, again.Recompute = 0, "full"
		got, err = VerifyReceipt(context.Background(), receipts.Verification{Checkpoint: c.Checkpoint, Change: placed(again)})
	}
	require.NoError(t, err, "%+v\nagain %+v", c.Config, again.Config)
	require.Equal(t, c.Steps, got.Checked)
	require.Equal(t, c.Receipt, got.Receipt)
	return len(got.Segments)
}

// firstHonest is the seed of the first random run.
const firstHonest = 3100

// TestHonestRunsVerify checks that random runs verify on other ranks, stages, placements and SIMD
// levels. SPILLWAY_LONG=all verifies 300 segments.
func TestHonestRunsVerify(t *testing.T) {
	t.Parallel()
	exe, err := os.Executable()
	require.NoError(t, err)
	segments := 0
	for seed := uint64(firstHonest); segments < long.Of(16, 100, 300); seed++ {
		dir := scratch(t)
		c, again := honestCase(t, seed, t.TempDir())
		c = in(c, dir)
		runOf(t, c)
		segments += verified(t, c, again)
		if c.Precision != "fp32" || seed%2 > 0 {
			continue
		}
		l := level.Level(seed/2) % (level.Best() + 1)
		cmd := exec.Command(exe, "-test.run=^TestVerifyAtLevel$", "-test.v")
		cmd.Env = append(os.Environ(), seedVariable+"="+strconv.FormatUint(seed, 10), levelVariable+"="+l.String(), "SPILLWAY_TEST_RUN="+dir)
		text, err := cmd.CombinedOutput()
		require.NoError(t, err, "seed %d at %s: %s", seed, l, text)
		_, after, ok := strings.Cut(string(text), "verified at "+l.String()+": ")
		require.True(t, ok, "%s", text)
		n, err := strconv.Atoi(strings.Fields(after)[0])
		require.NoError(t, err)
		segments += n
	}
	t.Logf("%d segments verified", segments)
}

// TestVerifyAtLevel verifies a run for TestHonestRunsVerify in a process with another SIMD level.
func TestVerifyAtLevel(t *testing.T) {
	dir := os.Getenv("SPILLWAY_TEST_RUN")
	if dir == "" {
		t.Skip("for TestHonestRunsVerify, which runs it in processes of its own")
	}
	seed, err := strconv.ParseUint(os.Getenv(seedVariable), 10, 64)
	require.NoError(t, err)
	c, again := honestCase(t, seed, t.TempDir())
	c = in(c, dir)
	fmt.Printf("verified at %s: %d segments\n", level.Current(), verified(t, c, again))
}

// forger makes runs that contradict their receipts. Its methods bit, sample, rate and rewrite each
// make one kind of forgery and check that verification finds it.
type forger struct {
	*testing.T
	r      *rand.Rand
	c      request
	honest []receipt.Record
}

// trained runs c and calls at with 0 before the first step and after each step.
func (f *forger) trained(at func(tr *Trainer, step int)) {
	tr, err := f.c.start(context.Background())
	require.NoError(f, err)
	at(tr, 0)
	require.NoError(f, tr.Run(context.Background(), func(r StepResult) error {
		at(tr, r.Step)
		return nil
	}))
	require.NoError(f, tr.Close())
}

// verify runs all segments of the run again, on other ranks and another stage.
func (f *forger) verify() (*receipts.Verified, error) {
	again := f.c
	if f.c.Reproducible {
		again.Ranks = 1 + f.r.IntN(f.c.Ranks)
	}
	again.Zero = f.r.IntN(4)
	return VerifyReceipt(context.Background(), receipts.Verification{Checkpoint: f.c.Checkpoint, Receipt: f.c.Receipt, Change: placed(again)})
}

// found returns the first difference that verification finds.
func (f *forger) found() *receipt.Difference {
	f.Helper()
	got, err := f.verify()
	require.ErrorIs(f, err, receipt.ErrDiffers, "not found")
	for i := range got.Segments {
		if d := got.Segments[i].Found; d != nil {
			require.LessOrEqual(f, got.Segments[i].From, d.Step)
			require.GreaterOrEqual(f, got.Segments[i].To, d.Step)
			return d
		}
	}
	f.Fatal("no segment differs: ", err)
	return nil
}

// bit flips one bit of a random element of a state, on every rank that holds it.
func (f *forger) bit() {
	step := 1 + f.r.IntN(f.c.Steps)
	var tensor receipt.Tensor
	var element int64
	f.trained(func(tr *Trainer, at int) {
		if at != step {
			return
		}
		require.NoError(f, tr.flush())
		list, err := tr.ranks.Tensors()
		require.NoError(f, err)
		tensor = list[f.r.IntN(len(list))]
		element = f.r.Int64N(tensor.Elems)
		bit := f.r.IntN(20) // in the mantissa, so that values stay finite
		for i := range tr.plan.Program.Params {
			for _, st := range tr.states.Names(i) {
				if tr.plan.Program.Params[i].Name != tensor.Name || run.Saved(st.Name) != tensor.State {
					continue
				}
				require.False(f, st.PerParam)
				require.NoError(f, tr.states.Extents(i, st.Name, element, 1, func(e run.Extent) error {
					b := make([]byte, e.DType.Size())
					return tr.ranks.Each("the flip", func(r *run.Rank) error {
						if !slices.Contains(e.Holders, r.Index) {
							return nil
						}
						b := slices.Clone(b)
						require.NoError(f, r.Exec.Read(e.Buf, e.Off, b))
						b[bit/8%len(b)] ^= 1 << (bit % 8)
						return r.Exec.Write(e.Buf, e.Off, b)
					})
				}))
			}
		}
	})
	d := f.found()
	require.NotNil(f, d.State)
	require.Equal(f, step, d.After)
	require.Equal(f, tensor, d.State.Tensor)
	require.LessOrEqual(f, d.State.From, element)
	require.Greater(f, d.State.To, element)
	require.Zero(f, d.State.More)
	require.Empty(f, d.What)
}

// swapping returns other tokens for one window while on is set.
type swapping struct {
	data.Source
	on         bool
	what, with int64
}

func (s *swapping) Tokens(dst []int32, start int64) error {
	if s.on && (start == s.what || start == s.what+1) {
		start += s.with - s.what
	}
	return s.Source.Tokens(dst, start)
}

// sample replaces one sample of a step by another. Half of the forgeries record the right sample in
// the receipt.
func (f *forger) sample() {
	step, lie := 1+f.r.IntN(f.c.Steps), f.r.IntN(2) == 0
	swap := &swapping{}
	f.trained(func(tr *Trainer, at int) {
		if at == 0 {
			b := *tr.train
			swap.Source = b.source
			var err error
			b.sampler, err = data.NewSampler(swap, tr.cfg.sampling(data.Sequential, trainField))
			require.NoError(f, err)
			tr.train = &b
		}
		if at == step-1 {
			s := tr.train.sampler
			swap.what = s.Start(at, 0, f.r.IntN(f.c.Ranks), f.r.IntN(f.c.Batch))
			swap.with = (swap.what/int64(f.c.Seq)*int64(f.c.Seq) + int64(f.c.Seq)*(1+f.r.Int64N(20))) % (s.Windows() * int64(f.c.Seq))
			swap.on = true
		}
		if at == step {
			swap.on = false
			if lie {
				tr.receipt.Steps[len(tr.receipt.Steps)-1].Data = f.stepOf(step).Data
			}
		}
	})
	d := f.found()
	require.Equal(f, step, d.Step)
	require.NotNil(f, d.State)
	if !lie {
		require.Contains(f, d.What, "samples of SHA-256")
	}
}

// rate makes a step use another learning rate. Half of the forgeries record the right rate in the
// receipt.
func (f *forger) rate() {
	step, lie := 1+f.r.IntN(f.c.Steps), f.r.IntN(2) == 0
	var was *resolved
	f.trained(func(tr *Trainer, at int) {
		if at == step-1 {
			was = tr.cfg
			changed := *tr.cfg.Resolved
			changed.LR *= 1 + 0.01*f.r.Float64()
			tr.cfg = &resolved{&changed, tr.cfg.hooks}
		}
		if at == step {
			tr.cfg = was
			if lie {
				tr.receipt.Steps[len(tr.receipt.Steps)-1].LR = f.stepOf(step).LR
			}
		}
	})
	d := f.found()
	require.Equal(f, step, d.Step)
	require.Equal(f, step, d.After)
	require.NotNil(f, d.State)
	if !lie {
		require.Contains(f, d.What, "learning rate")
	}
}

// stepOf returns the entry of a step in the honest receipt.
func (f *forger) stepOf(step int) receipt.Step {
	for _, r := range f.honest {
		if i := step - 1 - (r.Step - len(r.Steps)); i >= 0 && i < len(r.Steps) {
			return r.Steps[i]
		}
	}
	f.Fatal("no step ", step)
	return receipt.Step{}
}

// rewrite changes a part of the honest receipt and, except in one case, computes a new chain.
func (f *forger) rewrite() {
	records := clone(f.T, f.honest)
	n := 1 + f.r.IntN(len(records)-1) // the first is a start
	rec := &records[n]
	var expect func(*receipts.Verified, error)
	at := func(words string) func(*receipts.Verified, error) {
		return func(v *receipts.Verified, err error) {
			require.ErrorIs(f, err, receipt.ErrDiffers)
			require.ErrorContains(f, err, words)
		}
	}
	broken := func(line int) func(*receipts.Verified, error) {
		return func(_ *receipts.Verified, err error) {
			var b *receipt.Broken
			require.ErrorAs(f, err, &b)
			require.Equal(f, line, b.Line)
		}
	}
	rechain := true
	switch f.r.IntN(9) {
	case 0:
		tensors := records[0].Run.Tensors
		i := f.r.IntN(len(tensors))
		k := f.r.Int64N(tensors[i].Ranges())
		rec.Ranges[i][k*receipt.Size+int64(f.r.IntN(receipt.Size))] ^= 1 << f.r.IntN(8)
		rec.Root = receipt.Root(tensors, rec.Ranges)
		expect = at(fmt.Sprintf("the states after step %d: %s, elements %d to", rec.Step, tensors[i].String(), k*receipt.RangeElems))
	case 1:
		rec.Steps[0].Loss = "3f800000"
		expect = at(fmt.Sprintf("step %d: loss", rec.Step))
	case 2:
		rec.Steps[0].LR *= 1.25
		expect = at(fmt.Sprintf("step %d: learning rate", rec.Step))
	case 3:
		rec.Steps[0].Data = records[n-1].Root
		expect = at(fmt.Sprintf("step %d: samples", rec.Step))
	case 4:
		rec.Sample++
		expect = at(fmt.Sprintf("step %d: ", rec.Step))
	case 5: // another setting for all steps
		field, text := "Seed", "7777"
		if f.r.IntN(2) == 0 {
			field, text = "LR", "0.0123"
		}
		records[0].Run.Config[field] = json.RawMessage(text)
		expect = at("step")
	case 6: // remove the last line
		records = records[:len(records)-1]
		expect = at("its last lines are missing")
	case 7: // remove another line
		if n == len(records)-1 {
			n--
		}
		records = append(records[:n:n], records[n+1:]...)
		expect = broken(n + 1)
	default: // change a line but not the chain after it
		rec.Steps[0].GradNorm = "3ff0000000000000"
		rechain = false
		expect = broken(n + 2)
		if n == len(records)-1 { // no line follows
			expect = at(fmt.Sprintf("step %d: gradient norm", rec.Step))
		}
	}
	if rechain {
		chain(f.T, records)
	}
	var text []byte
	for _, r := range records {
		text = append(text, lineOf(f.T, r)...)
	}
	require.NoError(f, os.WriteFile(f.c.Receipt, text, 0o644))
	expect(f.verify())
}

func lineOf(t testing.TB, r receipt.Record) []byte {
	text, err := json.Marshal(r)
	require.NoError(t, err)
	return append(text, '\n')
}

func chain(t testing.TB, records []receipt.Record) {
	prev := ""
	for i := range records {
		records[i].Prev = prev
		prev = receipt.HashOf(lineOf(t, records[i]))
	}
}

func clone(t testing.TB, records []receipt.Record) (list []receipt.Record) {
	text, err := json.Marshal(records)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &list))
	return list
}

func recordsOf(t testing.TB, path string) (list []receipt.Record) {
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	for line := range bytes.Lines(text) {
		var r receipt.Record
		require.NoError(t, json.Unmarshal(line, &r))
		list = append(list, r)
	}
	return list
}

// TestForgeriesAreFound checks that verification finds and locates each forgery: a flipped bit,
// another sample, another rate, or a rewritten chain. SPILLWAY_LONG=all runs 300 forgeries.
func TestForgeriesAreFound(t *testing.T) {
	t.Parallel()
	for n := range long.Of(12, 100, 300) {
		r := rand.New(rand.NewPCG(uint64(n), 32))
		dir := scratch(t)
		c := tiny([]string{"gpt2", "llama-tied"}[n/4%2])
		c.poison = false
		c.Seq, c.Batch, c.Ranks, c.Zero, c.Reproducible = 16, 1+r.IntN(2), 1+r.IntN(3), r.IntN(4), r.IntN(2) == 0
		c.Optimizer = []string{"adamw", "sgd"}[r.IntN(2)]
		c = in(kept(c, r), dir)
		c.ReceiptEvery = 1
		f := &forger{T: t, r: r, c: c}
		if n%4 > 0 { // all forgeries but bit need an honest receipt
			f.trained(func(*Trainer, int) {})
			f.honest = recordsOf(t, c.Receipt)
			if n%4 < 3 {
				require.NoError(t, os.RemoveAll(c.Checkpoint))
				require.NoError(t, os.Remove(c.Receipt))
			}
		}
		[]func(){f.bit, f.sample, f.rate, f.rewrite}[n%4]()
		if t.Failed() {
			t.Fatalf("forgery %d", n)
		}
	}
}
