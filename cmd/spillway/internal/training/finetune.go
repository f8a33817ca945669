package training

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/jobs"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/planner"
)

// FinetuneAsTrain is the command line of train, from the word train on, that does what finetune
// does with these arguments. It writes to w what finetune chooses.
func FinetuneAsTrain(ctx context.Context, args []string, w io.Writer) ([]string, error) {
	cmd := FinetuneCommand()
	cli.DecimalNumbers(cmd)
	cli.NamedPaths(cmd)
	fs := cmd.Flags()
	switch err := cmd.ParseFlags(args); {
	case errors.Is(err, pflag.ErrHelp):
		return nil, errors.New("finetune --help: spillway finetune --help, without launch, prints its flags")
	case err != nil:
		return nil, cli.FlagError(cmd, err)
	}
	if err := cmd.Args(cmd, fs.Args()); err != nil {
		return nil, err
	}
	full, _ := fs.GetBool("full")
	tell, err := finetuning(ctx, fs, fs.Arg(0), fs.Arg(1), full)
	if err != nil {
		return nil, err
	}
	tell(w)
	return trainArgs(fs), nil
}

// FinetuneCommand is finetune: train with other defaults.
func FinetuneCommand() *cobra.Command {
	var full bool
	cmd := newCommand(func(cmd *cobra.Command, args []string) (func(io.Writer), error) {
		return finetuning(cmd.Context(), cmd.Flags(), args[0], args[1], full)
	})
	cmd.Use, cmd.Short = "finetune MODEL DATA", "Train a model's folder or checkpoint further, on conversations or text"
	cmd.Long = `Train a model further: train with the defaults of fine-tuning. It trains low-rank
adapters (--lora; all parameters with --full), on the answers of conversations, for
3 epochs, and says what it chooses and the train command that does the same.

MODEL is a folder with config.json and model.safetensors, or a checkpoint. DATA is
as train's --data. Any flag of train overrides a value.`
	cmd.Example = "  spillway finetune ./SmolLM2-135M pairs.jsonl"
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		if len(args) != 2 {
			return jobs.RefuseTogether(fmt.Errorf("finetune takes a model's folder and a data path, as in spillway finetune ./model pairs.jsonl (got %d arguments)", len(args)))
		}
		return nil
	}
	cmd.Flags().BoolVar(&full, "full", false, "train all parameters, not adapters beside them")
	for _, name := range []string{"model", "init", "data"} {
		cmd.Flags().Lookup(name).Hidden = true // they are the arguments
	}
	return cmd
}

// Rates at which models of 4096 are fine-tuned, adapters (Dettmers et al. 2023) and whole
// (TRL's default). A narrower model takes a larger one, by its width (Yang et al. 2022), up
// to a limit.
const (
	adapterRate, fullRate = 2e-4, 2e-5
	rateWidth             = 4096
	mostAdapter, mostFull = 5e-3, 1e-3
	finetuneWarmup        = 10
)

// finetuning sets the flags that were not given, and returns what says so.
func finetuning(ctx context.Context, fs *pflag.FlagSet, folder, data string, full bool) (func(io.Writer), error) {
	if path := fs.Lookup("config").Value.String(); path != "" { // before what is chosen here
		if err := cli.ApplyConfigFile(fs, path); err != nil {
			return nil, err
		}
	}
	for _, name := range []string{"model", "init", "data"} {
		if fs.Changed(name) {
			return nil, fmt.Errorf("--%s with finetune: the model and the data are its arguments; leave it out", name)
		}
	}
	if full && fs.Changed("lora") {
		return nil, errors.New("--full with --lora: all parameters are trained, or adapters beside them; leave one out")
	}
	if st, err := os.Stat(folder); err != nil || !st.IsDir() {
		return nil, fmt.Errorf("finetune %s: no such folder; give one with config.json and model.safetensors, or a checkpoint (a preset has no weights)", cli.Cut(folder))
	}
	shape, err := planner.ModelConfig(folder)
	if err != nil {
		return nil, err
	}
	absolute, err := filepath.Abs(folder)
	if err != nil {
		return nil, err
	}
	m, err := planner.OpenModel(ctx, folder, model.ConfigFile)
	if err != nil {
		return nil, err
	}
	folder = m.Path // of checkpoints the newest, whose tokenizer and template it takes
	if err := m.Close(); err != nil {
		return nil, err
	}
	rate, most := adapterRate, mostAdapter
	if full {
		rate, most = fullRate, mostFull
	}
	rate = min(rate*rateWidth/float64(shape.Width), most)
	chosen := [][2]string{
		{"model", folder}, {"init", folder}, {"data", data},
		{"lr", strconv.FormatFloat(rate, 'g', 2, 64)}, {"lr-schedule", "cosine"}, {"warmup", strconv.Itoa(finetuneWarmup)},
		{"weight-decay", "0"}, {"clip", "1"}, {"seq", strconv.Itoa(min(1024, shape.Positions))}, {"fit", "true"},
		{"checkpoint", "./" + filepath.Base(absolute) + "-finetuned"},
	}
	if !full {
		chosen = append(chosen, [2]string{"lora", "r=16"})
	}
	if !fs.Changed("steps") {
		chosen = append(chosen, [2]string{"epochs", "3"})
	}
	for _, f := range chosen {
		if !fs.Changed(f[0]) {
			if err := fs.Set(f[0], f[1]); err != nil {
				return nil, fmt.Errorf("finetune: --%s: %w", f[0], err)
			}
		}
	}
	return func(w io.Writer) { tellFinetuning(w, fs, shape.Width, full) }, nil
}

// tellFinetuning says in four lines what is trained and why, and the command that does it.
func tellFinetuning(w io.Writer, fs *pflag.FlagSet, width int, full bool) {
	value := func(name string) string { return fs.Lookup(name).Value.String() }
	what := fmt.Sprintf("trains adapters (--lora %s) beside the blocks' products: few parameters, and the model stays as it is; --full trains all", value("lora"))
	if full {
		what = "trains all parameters, with memory for gradients and moments of each (--full); without it adapters alone"
	}
	length := "for " + value("epochs") + " epochs"
	if fs.Changed("steps") {
		length = "for " + value("steps") + " steps"
	}
	if value("epochs") == "1" {
		length = "for 1 epoch"
	}
	lines := []string{
		what,
		fmt.Sprintf("at a rate of %s, falling by --lr-schedule %s after %s steps of warm-up: narrow models take larger ones, and this one's width is %d", value("lr"), value("lr-schedule"), value("warmup"), width),
		fmt.Sprintf("%s, in rows of %s tokens; of conversations, which share rows, the answers alone count (--loss-on all counts everything)", length, value("seq")),
		fmt.Sprintf("--fit chooses where its states rest, and checkpoints go to %s", cli.OnOneLine(value("checkpoint"))),
	}
	for _, line := range lines {
		fmt.Fprintln(w, line)
	}
	fmt.Fprintf(w, "the same: spillway %s\n", planner.Shell(trainArgs(fs)))
}

// trainArgs are the arguments of train with the flags that are set.
func trainArgs(fs *pflag.FlagSet) []string {
	args := []string{"train"}
	fs.Visit(func(f *pflag.Flag) {
		switch {
		case f.Name == "full":
		case f.Value.Type() == "bool" && f.Value.String() == "true":
			args = append(args, "--"+f.Name)
		case f.Value.Type() == "bool":
			args = append(args, "--"+f.Name+"="+f.Value.String())
		default:
			args = append(args, "--"+f.Name, f.Value.String())
		}
	})
	return args
}
