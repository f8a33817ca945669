// Package infer implements the commands generate, chat and eval.
package infer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/host"
	"github.com/spillway-ml/spillway/internal/safetensors"
	"github.com/spillway-ml/spillway/planner"
	trainer "github.com/spillway-ml/spillway/train"
)

// inferenceFlags binds the flags of train that generate, chat and eval share.
func inferenceFlags(fs *pflag.FlagSet, c *spillway.Config) {
	*c = spillway.Default()
	c.Inference = true
	fs.StringVar(&c.Tokenizer, "tokenizer", "", "bytes, gpt2, or a tokenizer.json `FILE` (default: the model's own)")
	fs.StringVar(&c.Precision, "precision", c.Precision, "type to compute in: fp32, bf16 or fp16")
	fs.IntVar(&c.Ranks, "ranks", 1, "world size")
	fs.IntVar(&c.Zero, "zero", c.Zero, "ZeRO stage: 0, 1, 2 or 3; at 3 the parameters are sharded over the ranks")
	fs.IntVar(&c.Prefetch, "prefetch", c.Prefetch, "units gathered ahead of their use")
	fs.StringVar(&c.Device, "device", c.Device, "cpu, or cuda: spread the ranks over this machine's NVIDIA GPUs")
	fs.IntVar(&c.Threads, "threads", 0, "compute threads, shared by the ranks (default: all cores)")
	fs.Var(cli.Size(&c.DeviceMemory), "device-memory", "cap on a rank's device memory")
	fs.Var(cli.Size(&c.HostMemory), "host-memory", "cap on a rank's host memory")
	fs.DurationVar(&c.Timeout, "timeout", c.Timeout, "longest wait of a collective")
}

// modelFlag binds --model.
func modelFlag(fs *pflag.FlagSet, c *spillway.Config) {
	fs.StringVar(&c.Model, "model", "", "`DIR` of a Hugging Face model, of a checkpoint, or of checkpoints (the newest is used)")
}

// samplingFlags binds the flags that control how tokens are drawn.
func samplingFlags(fs *pflag.FlagSet, how *trainer.Decoding) {
	how.Sampling = spillway.Sampling{Temperature: 0.8, TopK: 50}
	fs.Float64Var(&how.Temperature, "temperature", how.Temperature, "divisor of the logits; 0 always chooses the likeliest token")
	fs.IntVar(&how.TopK, "top-k", how.TopK, "number of likeliest tokens to draw from; 0: all")
	fs.Float64Var(&how.TopP, "top-p", 1, "draw from the fewest likeliest tokens whose probabilities reach this sum; 1: all")
	fs.Uint64Var(&how.Seed, "seed", 1, "seed for drawing tokens")
	fs.StringArrayVar(&how.Stop, "stop", nil, "end an answer before this `TEXT`; may be repeated")
}

// templateFlag binds --template.
func templateFlag(fs *pflag.FlagSet, c *spillway.Config) {
	fs.StringVar(&c.Template, "template", "", "`FILE` with a Jinja chat template (default: the model's own)")
}

// refuseSampling rejects settings with which no answer can be drawn.
func refuseSampling(fs *pflag.FlagSet, how *trainer.Decoding) error {
	switch {
	case slices.Contains(how.Stop, ""):
		return errors.New("--stop: the text is empty; leave it out")
	case fs.Changed("top-p") && how.TopP == 0: // 0 in Sampling means all
		return errors.New("--top-p 0: a probability is needed, over 0 and at most 1; --temperature 0 takes the likeliest token")
	}
	return how.Sampling.Validate()
}

// openModel opens the model of --model and verifies its config and the files weights, or
// checkpoint.AsLoaded.
func openModel(ctx context.Context, c *spillway.Config, stderr io.Writer, weights string) (*planner.Model, error) {
	if c.Model == "" {
		return nil, errors.New("--model is missing: a Hugging Face folder, a checkpoint, or a folder of checkpoints")
	}
	if st, err := os.Stat(c.Model); err != nil || !st.IsDir() {
		return nil, fmt.Errorf("--model %s: no such folder; a Hugging Face folder, a checkpoint or a folder of checkpoints is needed (a preset has no weights)", c.Model)
	}
	m, err := planner.OpenModel(ctx, c.Model, weights)
	if err != nil {
		return nil, fmt.Errorf("--model %s: %w", c.Model, err)
	}
	for _, p := range m.Passed {
		fmt.Fprintln(stderr, "warning:", p)
	}
	if m.Chosen {
		fmt.Fprintf(stderr, "model: %s\n", cli.OnOneLine(m.Path))
	} else if !m.Readable() {
		return nil, fmt.Errorf("--model %s: there is neither a config.json nor a checkpoint", c.Model)
	}
	if m.Path == filepath.Base(m.Path) {
		m.Path = "." + string(filepath.Separator) + m.Path // never a preset's name
	}
	c.Model, c.Init = m.Path, m.Path
	return m, nil
}

// newInference makes a trainer for the model of c.Model; prepare completes c once the model is
// found. If weights turn out damaged while they are loaded, it searches a folder of checkpoints
// again.
func newInference(ctx context.Context, c *spillway.Config, stderr io.Writer, prepare func(*spillway.Config, *planner.Model) error) (*spillway.Trainer, func() error, error) {
	given := *c
	t, closeAll, err := tryInference(ctx, c, stderr, checkpoint.AsLoaded, prepare)
	if errors.Is(err, checkpoint.ErrDamaged) {
		*c = given
		t, closeAll, err = tryInference(ctx, c, stderr, safetensors.FileName, prepare)
	}
	return t, closeAll, err
}

func tryInference(ctx context.Context, c *spillway.Config, stderr io.Writer, weights string, prepare func(*spillway.Config, *planner.Model) error) (t *spillway.Trainer, closeAll func() error, err error) {
	m, err := openModel(ctx, c, stderr, weights)
	if err != nil {
		return nil, nil, err
	}
	if err = prepare(c, m); err == nil {
		t, closeAll, err = host.NewTrainer(ctx, *c, func(ctx context.Context, c spillway.Config) (*spillway.Trainer, error) {
			return trainer.NewFrom(ctx, c, m)
		})
	}
	if cerr := m.Close(); err == nil && cerr != nil {
		err = errors.Join(cerr, closeAll())
	}
	return t, closeAll, err
}

// seqOf returns the default of --seq: the row length of the model's training, or 1024 if that is
// not known, and at most its positions.
func seqOf(m *planner.Model, positions int) (int, error) {
	n, err := m.TrainedSeq()
	return min(cmp.Or(n, 1024), positions), err
}

// printable returns a filter for text: to UTF-8, and for a terminal without control characters.
func printable(w io.Writer) func(string) string {
	if cli.IsTerminal(w) {
		return cli.Visible
	}
	return func(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }
}
