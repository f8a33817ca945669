package bench

import (
	"bufio"
	"context"
	_ "embed"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/planner"
)

//go:embed peer.py
var peerScript []byte

// peerModes are PyTorch's methods, each with the stage that it corresponds to.
var peerModes = []struct {
	name string
	zero int
}{{"DDP", 0}, {"ZeroRedundancyOptimizer", 1}, {"FSDP2", 3}, {"FSDP2 offload", 3}}

// peerJob is the input of peer.py.
type peerJob struct {
	Mode        string          `json:"mode"`
	Device      string          `json:"device"`
	Model       peerModel       `json:"model"`
	Parameters  []peerParameter `json:"parameters"` // in the order of the file
	Weights     string          `json:"weights"`    // fp32 values
	Samples     string          `json:"samples"`    // int32 tokens and targets of each micro-batch
	Meet        string          `json:"meet"`
	Ranks       int             `json:"ranks"`
	Threads     int             `json:"threads"`
	Batch       int             `json:"batch"`
	Seq         int             `json:"seq"`
	Accum       int             `json:"accum"`
	LR          []float64       `json:"lr"`      // by step
	Targets     []int64         `json:"targets"` // by step
	Beta1       float64         `json:"beta1"`
	Beta2       float64         `json:"beta2"`
	Eps         float64         `json:"eps"`
	WeightDecay float64         `json:"weight_decay"`
	Clip        float64         `json:"clip"`
	BF16        bool            `json:"bf16"`
}

type peerModel struct {
	Layers    int     `json:"layers"`
	Width     int     `json:"width"`
	Heads     int     `json:"heads"`
	Vocab     int     `json:"vocab"`
	Positions int     `json:"positions"`
	Eps       float64 `json:"eps"`
}

type peerParameter struct {
	Name  string  `json:"name"`
	Shape []int64 `json:"shape"`
}

// peerCan returns the reason why peer.py cannot run a configuration; nil: it can.
func peerCan(c *spillway.Config, m *model.Config) error {
	for _, no := range []struct {
		is   bool
		what string
	}{
		{m.Family != "gpt2", "GPT-2 models, as --model gpt2, and " + c.Model + " is of " + string(m.Family)},
		{!strings.EqualFold(c.Optimizer, "adamw"), "AdamW"},
		{c.Dropout > 0, "no dropout, whose random numbers are its own"},
		{len(c.Freeze) > 0 || c.LoRA.Rank > 0, "training all parameters"},
		{len(c.Int8) > 0 || c.OptimizerDType == "bf16", "fp32 states"},
		{strings.EqualFold(c.Precision, "fp16"), "fp32 and bf16"},
		{c.GlobalBatch > 0 && c.RankShares != nil, "equal shares of the ranks"},
	} {
		if no.is {
			return fmt.Errorf("the peer's script has %s", no.what)
		}
	}
	return nil
}

// addPeer adds a job with PyTorch for each of peerModes. Their input files are in dir.
func (s *session) addPeer(ctx context.Context, args []string, dir string) error {
	c, err := configOf(append(args[:len(args):len(args)], "--zero=3"))
	if err != nil {
		return err
	}
	spec, can := &peerJob{}, error(nil)
	if m, err := planner.ModelConfig(c.Model); err != nil {
		return err
	} else if can = peerCan(&c, &m); can == nil {
		spec.Model = peerModel{m.Layers, m.Width, m.Heads, m.Vocab, m.Positions, m.NormEps}
	}
	python, noPython := exec.LookPath("python3")
	if noPython != nil && can == nil {
		can = errors.New("there is no python3 in PATH")
	}
	if can != nil {
		fmt.Fprintf(s.progress, "PyTorch's rows will be missing: %v\n", can)
	} else {
		if err := spec.write(ctx, c, dir); err != nil {
			return fmt.Errorf("--peer torch: %w", err)
		}
	}
	script := filepath.Join(dir, "peer.py")
	if err := os.WriteFile(script, peerScript, 0o600); err != nil {
		return err
	}
	for _, mode := range peerModes {
		r := Row{Version: rowVersion, Name: mode.name, By: "PyTorch", Zero: mode.zero, Model: c.Model, Precision: c.PrecisionName(), Ranks: c.Ranks, Batch: c.Batch, Seq: spec.Seq, Accum: c.Accum}
		one := *spec
		one.Mode = mode.name
		text, err := json.Marshal(one)
		path := filepath.Join(dir, strings.ReplaceAll(mode.name, " ", "-")+".json")
		if err == nil {
			err = os.WriteFile(path, text, 0o600)
		}
		if err != nil {
			return err
		}
		r.Command = []string{"python3", "peer.py", filepath.Base(path)}
		if can != nil {
			r.Missing = can.Error()
		}
		s.jobs = append(s.jobs, &job{Row: r, argv: []string{python, script, path}})
	}
	return nil
}

// write writes the files of a job: the initial values of the parameters, and the samples of all
// steps.
func (j *peerJob) write(ctx context.Context, c spillway.Config, dir string) (err error) {
	j.Device, c.Device = strings.ToLower(c.Device), "cpu"
	c.DeviceMemory, c.HostMemory, c.Precision = 0, 0, "fp32" // no caps and fp32: this trainer only supplies values
	t, err := spillway.New(ctx, c)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.Close()) }()
	c.Seq = t.Config().Seq
	j.Ranks, j.Threads, j.Batch, j.Seq, j.Accum = c.Ranks, c.ComputeThreads(), c.Batch, c.Seq, c.Accum
	j.Beta1, j.Beta2, j.Eps, j.WeightDecay, j.Clip = c.Beta1, c.Beta2, c.Eps, c.WeightDecay, c.Clip
	j.Weights, j.Samples, j.Meet = filepath.Join(dir, "weights"), filepath.Join(dir, "samples"), filepath.Join(dir, "meet")
	err = writeFile(j.Weights, func(put func(any) error) error {
		for _, name := range t.Parameters() {
			shape, values, err := t.Parameter(name)
			if err == nil {
				err = put(values)
			}
			if err != nil {
				return err
			}
			j.Parameters = append(j.Parameters, peerParameter{name, shape})
		}
		return nil
	})
	if err != nil {
		return err
	}
	return writeFile(j.Samples, func(put func(any) error) error {
		for step := range c.Steps {
			j.LR = append(j.LR, c.LearningRate(step))
			j.Targets = append(j.Targets, 0)
			for micro := range c.Accum {
				for rank := range c.Ranks {
					tokens, targets, err := t.Sample(step, micro, rank)
					if err := errors.Join(err, put(tokens), put(targets)); err != nil {
						return err
					}
					for _, v := range targets {
						if v >= 0 {
							j.Targets[step]++
						}
					}
				}
			}
		}
		return nil
	})
}

// writeFile writes little-endian values to a file.
func writeFile(path string, all func(put func(any) error) error) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	w := bufio.NewWriterSize(f, 1<<20)
	err = all(func(v any) error { return binary.Write(w, binary.LittleEndian, v) })
	return errors.Join(err, w.Flush(), f.Close())
}

// agreement returns the largest relative difference between the peer's losses and Spillway's.
func agreement(ours, theirs *Row) float64 {
	most := 0.0
	for i := range min(len(ours.Losses), len(theirs.Losses)) {
		most = max(most, math.Abs(ours.Losses[i]-theirs.Losses[i])/math.Abs(ours.Losses[i]))
	}
	return most
}

// The largest relative differences of losses over a round that another order of sums explains: bf16
// has 8 bits.
const (
	agreeFP32 = 1e-3
	agreeBF16 = 2e-2
)

// If the system's share of the peer's processor time is above muchSystem, a note says so.
// keptMemory are glibc's settings with which freed memory stays with the process (mallopt(3)).
const (
	muchSystem = 0.2
	keptMemory = "MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=34359738368 MALLOC_TOP_PAD_=268435456"
)

// peerNotes compares the peer's rows with the corresponding stages. It returns an error if losses
// differ by more than sums in another order explain.
func (s *session) peerNotes() (notes []string, err error) {
	for _, j := range s.jobs {
		if !strings.HasPrefix(j.By, "PyTorch") || j.Missing != "" {
			continue
		}
		like := &s.jobs[j.Zero].Row
		if like.Missing != "" {
			continue
		}
		limit := agreeFP32
		if !strings.EqualFold(j.Precision, "fp32") {
			limit = agreeBF16
		}
		if room := s.jobs[3].within; room > 0 && j.ResidentBytes > room {
			notes = append(notes, fmt.Sprintf("%s does not run within the caps: PyTorch has no tier below the memory of its device for a CPU, and took %s a rank; the caps are %s together.", j.Name, plan.Bytes(j.ResidentBytes), plan.Bytes(room)))
		}
		apart := agreement(like, &j.Row)
		notes = append(notes, fmt.Sprintf("%s against %s: %s is %.2f × as fast, with %.2f × its resident memory a rank; losses differ by at most %.1g (relative).",
			like.Name, j.Name, like.Name, j.StepSecondsMedian/like.StepSecondsMedian, float64(like.ResidentBytes)/float64(max(j.ResidentBytes, 1)), apart))
		if j.SystemShare > muchSystem {
			notes = append(notes, fmt.Sprintf("%s spent %.0f %% of its processor time in the system, at %d page faults a step. "+
				"Where its C library gives freed memory back and gets it again, %s in the environment make it keep it.",
				j.Name, 100*j.SystemShare, j.PageFaults, keptMemory))
		}
		if apart > limit {
			err = errors.Join(err, fmt.Errorf("%s has other losses than %s: they differ by up to %.2g, want at most %g", j.Name, like.Name, apart, limit))
		}
	}
	if len(notes) > 0 {
		notes = append(notes, "Memory of both sides: the most resident bytes of a rank's process (VmHWM), less what it had before the model. Ranks of this program share a process; its memory is divided by them. The peer's includes what its allocator keeps of freed tensors and gloo's buffers, so not all of the ratio is the method's.")
		if set := tuning(os.Environ()); len(set) > 0 {
			notes = append(notes, "The environment sets the peer's libraries: "+strings.Join(set, ", ")+"; without these it may run at another speed.")
		}
	}
	return notes, err
}

// tuning returns the variables of an environment by which the peer's libraries choose kernels,
// threads and memory.
func tuning(environ []string) (set []string) {
	for _, v := range environ {
		for _, prefix := range []string{"OPENBLAS_", "GOTO_", "MKL_", "DNNL_", "OMP_", "KMP_", "MALLOC_", "GLIBC_TUNABLES=", "LD_PRELOAD="} {
			if strings.HasPrefix(v, prefix) {
				set = append(set, v)
			}
		}
	}
	slices.Sort(set)
	return set
}
