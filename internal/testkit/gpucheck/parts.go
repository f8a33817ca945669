package main

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spillway-ml/spillway/internal/gpus"
)

// model writes weights and tokens once, and returns the flags that use them.
func (b *bundle) model(name string, s shape) (dir, data string, err error) {
	dir, data = filepath.Join(b.work, name), filepath.Join(b.work, name+".bin")
	if _, err := os.Stat(data); err == nil {
		return dir, data, nil
	}
	if err := s.write(dir, 1); err != nil {
		return "", "", err
	}
	return dir, data, tokens(data, 1<<19, s.vocab, 1)
}

// runLosses trains GPT-2 124M from the same weights on the same tokens as
// PyTorch, in fp32 without TF32.
func runLosses(ctx context.Context, b *bundle, r *result) {
	s, batch, seq := gpt2Small, "4", "256"
	if b.quick {
		s, seq = tinyShape, "64"
	}
	dir, data, err := b.model("small", s)
	if err != nil {
		r.fail("%v", err)
		return
	}
	// The rate is low enough that the loss does not jump, because a jump would amplify differences
	// in the last bit.
	const steps, rate = "20", "1e-4"
	watch := func() (before, most int64, err error) { return 0, 0, nil }
	if b.gpu != nil {
		watch = b.watchMemory(ctx)
	}
	both := []string{"--data", data, "--steps", steps, "--lr", rate, "--batch", batch, "--seq", seq}
	mine, err := b.train(ctx, "losses", append([]string{"--model", dir, "--init", dir, "--zero", "0"}, both...)...)
	before, most, silent := watch()
	if err != nil {
		r.fail("%v", err)
		return
	}
	if silent != nil {
		r.say("NVML says nothing about memory: %v", silent)
	}
	if p := mine.peaks(); p != "" {
		r.fail("touched is not planned: %s", p)
	} else {
		r.say("planned = touched = %d bytes of device memory", mine.steps[0].DevicePlanned[0])
	}
	if most > 0 {
		r.compareUsed(most-before, mine.steps[0])
	}
	if b.python == "" {
		r.skip("python3 has no torch: no losses to compare with")
		return
	}
	theirs, err := b.runTorch(ctx, "losses-torch", append([]string{"--model", dir}, both...)...)
	if err != nil {
		r.fail("%v", err)
		return
	}
	worst, ok := compareLosses(mine.steps, theirs)
	r.Table = [][]string{{"step", "Spillway", "PyTorch", "relative difference"}}
	for i := range min(len(mine.steps), len(theirs)) {
		m, t := mine.steps[i].Loss, theirs[i].Loss
		r.Table = append(r.Table, []string{number(i + 1), fmt.Sprintf("%.7g", m), fmt.Sprintf("%.7g", t), fmt.Sprintf("%.1e", math.Abs(m-t)/math.Abs(t))})
	}
	r.say("largest relative difference of a loss: %.2e (wanted: 1e-4)", worst)
	if !ok {
		r.fail("the losses are not PyTorch's")
	}
}

// compareLosses returns the largest relative difference, and whether both runs have the same number
// of steps and agree to 1e-4.
func compareLosses(mine, theirs []step) (worst float64, ok bool) {
	ok = len(mine) == len(theirs) && len(mine) > 0
	for i := range min(len(mine), len(theirs)) {
		d := math.Abs(mine[i].Loss-theirs[i].Loss) / math.Abs(theirs[i].Loss)
		if !(d <= 1e-4) {
			ok = false
		}
		worst = math.Max(worst, d)
	}
	return worst, ok
}

// watchMemory starts a child that polls NVML for the memory in use, because an NVML call that hangs
// must not block this process. It returns once the child has reported the memory in use before. The
// returned function ends the child and returns that value and the highest one.
func (b *bundle) watchMemory(ctx context.Context) func() (before, most int64, err error) {
	ctx, stop := context.WithCancel(ctx)
	first, done := make(chan struct{}), make(chan *outcome, 1)
	seen := &firstLine{seen: first}
	go func() {
		done <- b.executeTo(ctx, seen, "memory", b.work, nil, b.self, "-child", "memory", "-uuid", hex.EncodeToString(b.gpu.uuid[:]))
	}()
	select {
	case <-first:
	case o := <-done:
		done <- o
	case <-time.After(lookLimit):
	}
	return func() (before, most int64, err error) {
		stop()
		o := <-done
		for line := range strings.Lines(string(o.out)) {
			n, e := strconv.ParseInt(strings.TrimSpace(line), 10, 64)
			if e != nil {
				continue
			}
			if before == 0 {
				before = n
			}
			most = max(most, n)
		}
		if most == 0 {
			err = errors.New(o.ended())
		}
		return before, most, err
	}
}

// firstLine closes seen at the first write.
type firstLine struct {
	once sync.Once
	seen chan struct{}
}

func (f *firstLine) Write(p []byte) (int, error) {
	f.once.Do(func() { close(f.seen) })
	return len(p), nil
}

// memoryChild writes a GPU's bytes in use ten times a second until it is killed.
func memoryChild(w io.Writer, uuid string) error {
	var id [16]byte
	if n, err := hex.Decode(id[:], []byte(uuid)); err != nil || n != len(id) {
		return fmt.Errorf("-uuid %q: want 32 hexadecimal digits", uuid)
	}
	for ; ; time.Sleep(100 * time.Millisecond) {
		n, err := gpus.Used(id)
		if err != nil {
			return err
		}
		if _, err := fmt.Fprintln(w, n); err != nil {
			return err
		}
	}
}

// planned is the part of `spillway plan`'s output about device memory.
type planned struct {
	Requested struct {
		Device struct {
			Peak    int64 `json:"peak_bytes"`
			Outside int64 `json:"outside_bytes"`
		} `json:"device"`
	} `json:"requested"`
}

func (b *bundle) plan(ctx context.Context, name string, args ...string) (peak, outside int64, err error) {
	all := append([]string{"plan", "--json", "-"}, args...)
	if b.gpu != nil {
		all = append(all, "--gpu", "detect")
	}
	o := b.execute(ctx, name, b.work, nil, b.program("spillway"), all...)
	var p planned
	if err := json.Unmarshal(o.out, &p); err != nil {
		return 0, 0, fmt.Errorf("plan %s", o.ended())
	}
	return p.Requested.Device.Peak, p.Requested.Device.Outside, nil
}

// compareUsed compares the driver's count of used bytes with the bytes that a run planned and the
// bytes that it measured outside its arena.
func (r *result) compareUsed(used int64, run step) {
	planned, outside := run.DevicePlanned[0], run.Outside
	want := planned + outside
	limit := int64(0.03*float64(want)) + 64<<20
	r.say("NVML's used bytes: %d; planned + the run's own outside: %d + %d; difference %+d, allowed %d", used, planned, outside, used-want, limit)
	if d := used - want; d > limit || d < -limit {
		r.fail("the GPU's used memory is not the plan's and what the run measured outside")
	}
}

// variant is one way to run the same training.
type variant struct {
	name  string
	flags []string
}

// variants returns the ways to train that must all give the same bits.
func variants() []variant {
	var list []variant
	for zero := range 4 {
		z := []string{"--zero", number(zero)}
		list = append(list,
			variant{fmt.Sprintf("ZeRO-%d", zero), z},
			variant{fmt.Sprintf("ZeRO-%d, full recompute", zero), append(slices.Clone(z), "--recompute", "full")},
			variant{fmt.Sprintf("ZeRO-%d, optimizer on the host", zero), append(slices.Clone(z), "--offload", "optimizer=host")})
	}
	return append(list, variant{"ZeRO-3, selective recompute, all states on the host",
		[]string{"--zero", "3", "--recompute", "selective", "--offload", "optimizer=host,parameters=host,gradients=host,activations=host"}})
}

// numberedVariant is a variant and its index.
type numberedVariant struct {
	variant
	i int
}

func numbered(list []variant) (all []numberedVariant) {
	for i, v := range list {
		all = append(all, numberedVariant{v, i})
	}
	return all
}

// runBits trains a small model in every way, on 1 and on 4 ranks, and compares the bits.
func runBits(ctx context.Context, b *bundle, r *result) {
	dir, data, err := b.model("tiny", tinyShape)
	if err != nil {
		r.fail("%v", err)
		return
	}
	r.Table = [][]string{{"ranks", "run", "parameters", "last loss", "planned = touched (bytes a rank)"}}
	for _, ranks := range []int{1, 4} {
		type run struct {
			*training
			err error
		}
		var want *training
		runs := inParallel(numbered(variants()), func(v numberedVariant) run {
			args := append([]string{"--model", dir, "--init", dir, "--data", data, "--steps", "4", "--batch", "2", "--seq", "64", "--ranks", number(ranks)}, v.flags...)
			got, err := b.train(ctx, fmt.Sprintf("bits-%d-%d", ranks, v.i), args...)
			return run{got, err}
		})
		if ctx.Err() != nil {
			return
		}
		for i, v := range variants() {
			got, err := runs[i].training, runs[i].err
			if err != nil {
				r.fail("%d ranks, %s: %v", ranks, v.name, err)
				continue
			}
			last := got.steps[len(got.steps)-1]
			row := []string{number(ranks), v.name, got.params[:min(12, len(got.params))], fmt.Sprintf("%.9g", last.Loss), fmt.Sprint(last.DevicePlanned)}
			if p := got.peaks(); p != "" {
				r.fail("%d ranks, %s: %s", ranks, v.name, p)
				row[4] = "**" + p + "**"
			}
			if want == nil {
				want = got
			} else if !sameBits(want, got) {
				r.fail("%d ranks, %s: other bits than ZeRO-0's", ranks, v.name)
				row[2] = "**" + row[2] + "**"
			}
			r.Table = append(r.Table, row)
		}
	}
}

// sameBits reports whether all losses and the final parameters are equal.
func sameBits(a, b *training) bool {
	return a.params != "" && a.params == b.params && slices.EqualFunc(a.steps, b.steps, func(x, y step) bool { return x.Loss == y.Loss })
}

// wallSlack is how much the memory measured outside the arena may differ between runs: the driver
// allocates in units of 2 MiB.
const wallSlack = 8 << 20

// runWall runs with exactly the planned memory, and with less. On the CPU the limit is exact to the
// byte. On a GPU it depends on the memory that a run measures outside its arena, so a run
// determines it first.
func runWall(ctx context.Context, b *bundle, r *result) {
	dir, data, err := b.model("tiny", tinyShape)
	if err != nil {
		r.fail("%v", err)
		return
	}
	shape := []string{"--model", dir, "--batch", "2", "--seq", "64", "--zero", "2"}
	peak, outside, err := b.plan(ctx, "plan-wall", shape...)
	if err != nil {
		r.fail("%v", err)
		return
	}
	run := append(slices.Clone(shape), "--data", data, "--steps", "1")
	slack := int64(0)
	if b.gpu != nil {
		free, err := b.train(ctx, "wall-free", run...)
		if err != nil {
			r.fail("without a cap: %v", err)
			return
		}
		outside, slack = free.steps[0].Outside, wallSlack
	}
	run = append(run, "--device-memory")
	fits, err := b.train(ctx, "wall-fits", append(slices.Clone(run), fmt.Sprint(peak+outside+slack))...)
	if err != nil {
		r.fail("with what the plan needs, %d + %d bytes: %v", peak, outside, err)
		return
	}
	if got := fits.steps[0].DevicePlanned[0]; got != peak {
		r.fail("plan says %d bytes, the run planned %d", peak, got)
	}
	refused, err := b.train(ctx, "wall-refused", append(slices.Clone(run), fmt.Sprint(peak+outside-slack-1))...)
	if err == nil {
		r.fail("with %d bytes less it ran all the same", slack+1)
		return
	}
	if refused.end.status != 2 {
		r.fail("with %d bytes less it ended with status %d, want 2: %s", slack+1, refused.end.status, refused.end.last())
		return
	}
	r.say("%d + %d bytes run; %d less are refused: %s", peak, outside, slack+1, strings.SplitN(strings.TrimSpace(string(refused.end.err)), "\n", 2)[0])
}
