package training

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/dustin/go-humanize/english"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/jobs"
	"github.com/spillway-ml/spillway/internal/safetensors"
	"github.com/spillway-ml/spillway/planner"
)

// FinetuneAsTrain returns a command line of train, including the word train, that does the same as
// finetune with args. It writes finetune's choices to w.
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
	tell, err := finetuning(ctx, fs, fs.Arg(0), fs.Arg(1), full, w)
	if err != nil {
		return nil, err
	}
	tell(w)
	return trainArgs(fs), nil
}

// FinetuneCommand returns the command finetune: train with other defaults.
func FinetuneCommand() *cobra.Command {
	var full bool
	cmd := newCommand(func(cmd *cobra.Command, args []string) (func(io.Writer), error) {
		return finetuning(cmd.Context(), cmd.Flags(), args[0], args[1], full, cmd.ErrOrStderr())
	})
	cmd.Use, cmd.Short = "finetune MODEL DATA", "Continue to train a model's folder or a checkpoint, on conversations or text"
	cmd.Long = `Continue to train a model: train with defaults for fine-tuning. It trains low-rank
adapters (--lora; all parameters with --full), on the answers of conversations, for
3 epochs. It prints its choices and the train command that does the same.

MODEL is a folder with config.json and model.safetensors, or a checkpoint. DATA has
the forms of train's --data. Any flag of train overrides a choice.`
	cmd.Example = "  spillway finetune ./SmolLM2-135M pairs.jsonl"
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		if len(args) != 2 {
			return jobs.RefuseTogether(fmt.Errorf("finetune takes a model's folder and a data path, "+
				"as in spillway finetune ./model pairs.jsonl (got %s)", english.Plural(len(args), "argument", "")))
		}
		return nil
	}
	cmd.Flags().BoolVar(&full, "full", false, "train all parameters instead of adapters")
	for _, name := range []string{"model", "init", "data"} {
		cmd.Flags().Lookup(name).Hidden = true // set by the arguments
	}
	return cmd
}

// Learning rates for fine-tuning models of width 4096: adapters (Dettmers et al. 2023) and all
// parameters (TRL's default). A narrower model gets a larger rate, inversely proportional to its
// width (Yang et al. 2022), up to a limit.
const (
	adapterRate, fullRate = 2e-4, 2e-5
	rateWidth             = 4096
	mostAdapter, mostFull = 5e-3, 1e-3
	finetuneWarmup        = 10
)

// finetuning sets the flags that were not given, and returns a function that prints the choices. It
// writes progress to w if verifying the weights takes long.
func finetuning(ctx context.Context, fs *pflag.FlagSet, folder, data string, full bool, w io.Writer) (func(io.Writer), error) {
	if path := fs.Lookup("config").Value.String(); path != "" { // before the choices below, which it overrides
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
	full = full || fs.Changed("lora") && fs.Lookup("lora").Value.String() == ""
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
	says := cli.NewProgress(w)
	says.Later("verifying the weights of " + cli.OnOneLine(folder) + " …")
	m, err := planner.OpenModel(ctx, folder, safetensors.FileName)
	if says.End(); err != nil {
		return nil, fmt.Errorf("finetune %s: %w", cli.Cut(folder), err)
	}
	given, passed := folder, m.Passed
	folder = m.Path // of a folder of checkpoints the newest complete one, with its tokenizer and template
	own, err := m.Adapters()
	if err = errors.Join(err, m.Close()); err != nil {
		return nil, err
	}
	if full && own.Active() {
		return nil, wholeOf(given, data, m.Saved() != nil)
	}
	rate, most := adapterRate, mostAdapter
	if full {
		rate, most = fullRate, mostFull
	}
	rate = min(rate*rateWidth/float64(shape.Width), most)
	warmup := finetuneWarmup
	if steps, err := fs.GetInt("steps"); err == nil && fs.Changed("steps") {
		warmup = min(warmup, max(steps, 0))
	}
	chosen := [][2]string{
		{"model", folder}, {"init", folder}, {"data", data},
		{"lr", strconv.FormatFloat(rate, 'g', 2, 64)}, {"lr-schedule", "cosine"}, {"warmup", strconv.Itoa(warmup)},
		{"weight-decay", "0"}, {"clip", "1"}, {"seq", strconv.Itoa(min(1024, shape.Positions))}, {"fit", "true"},
		{"checkpoint", "./" + filepath.Base(absolute) + "-finetuned"},
	}
	tell := telling{width: shape.Width, full: full, rate: !fs.Changed("lr"), own: own.Active() && !fs.Changed("lora")}
	switch {
	case tell.own:
		chosen = append(chosen, [2]string{"lora", own.String()})
	case !full:
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
	return func(w io.Writer) {
		for _, p := range passed {
			fmt.Fprintf(w, "warning: %s: %s\n", cli.OnOneLine(given), p)
		}
		tell.lines(w, fs)
	}, nil
}

// wholeOf returns the error for training all parameters of a folder with adapters. It names
// commands that work.
func wholeOf(folder, data string, checkpoint bool) error {
	const what = "finetune %s --full: it holds adapters, which are trained with the model frozen; leave --full out to train these on, or "
	if !checkpoint {
		a, err := planner.OpenAdapter(folder)
		if err != nil {
			return err
		}
		return fmt.Errorf(what+"train the model beneath them:\n  spillway %s", cli.Cut(folder),
			planner.Shell([]string{"finetune", a.Base, data, "--full"}))
	}
	merged := filepath.Clean(folder) + "-merged"
	return fmt.Errorf(what+"merge them into the model first:\n  spillway %s\n  spillway %s", cli.Cut(folder),
		planner.Shell([]string{"ckpt", "export", folder, "--merge", "--to", merged}), planner.Shell([]string{"finetune", merged, data, "--full"}))
}

// telling holds the reasons of finetune's choices that the flags do not tell.
type telling struct {
	width int  // of the model
	full  bool // all parameters are trained
	own   bool // training continues the adapters of the model's checkpoint
	rate  bool // the learning rate was chosen by the model's width
}

// lines prints four lines about the training and its reasons, and the train command that does the
// same.
func (t telling) lines(w io.Writer, fs *pflag.FlagSet) {
	value := func(name string) string { return fs.Lookup(name).Value.String() }
	what := fmt.Sprintf("trains adapters (--lora %s) beside the blocks' products: few parameters, and the model stays as it is; --full trains all", value("lora"))
	switch {
	case t.full:
		what = "trains all parameters, with memory for gradients and moments of each (--full); without it adapters alone"
	case t.own:
		what = fmt.Sprintf("goes on with the adapters that the model's folder holds (--lora %s): "+
			"another rank, alpha or other targets would change what they compute", value("lora"))
	}
	rate := "at a rate of " + value("lr")
	if value("lr-schedule") == "constant" {
		rate += ", which stays"
	} else {
		rate += ", falling by --lr-schedule " + value("lr-schedule")
	}
	if n := value("warmup"); n != "0" {
		rate += " after " + counted(n, "step") + " of warm-up"
	}
	if t.rate {
		rate += fmt.Sprintf(": narrow models take larger ones, and this one's width is %d", t.width)
	}
	length := "for " + counted(value("epochs"), "epoch")
	if fs.Changed("steps") {
		length = "for " + counted(value("steps"), "step")
	}
	rows, counts := "which share rows", "the answers alone count (--loss-on all counts everything)"
	if p := value("packing"); strings.EqualFold(p, "off") || p == "" && strings.EqualFold(value("device"), "cuda") {
		rows = "one a row"
	}
	if strings.EqualFold(value("loss-on"), "all") {
		counts = "every token counts (--loss-on answers counts the answers alone)"
	}
	rest := "--fit chooses where its states rest"
	if value("fit") == "false" {
		rest = "its states rest where --zero and --offload put them (--fit would choose)"
	}
	kept := "checkpoints go to " + cli.OnOneLine(value("checkpoint"))
	if c := value("checkpoint"); c == "" || c == "none" {
		kept = "no checkpoint is written (--checkpoint none)"
	}
	for _, line := range []string{
		what, rate,
		fmt.Sprintf("%s, in rows of %s; of conversations, %s, %s", length, counted(value("seq"), "token"), rows, counts),
		rest + ", and " + kept,
	} {
		fmt.Fprintln(w, line)
	}
	fmt.Fprintf(w, "the same: spillway %s\n", planner.Shell(trainArgs(fs)))
}

// counted returns a flag's value n with a noun: "3 steps".
func counted(n, thing string) string {
	number, _ := strconv.Atoi(n) // the flag is an int
	return english.Plural(number, thing, "")
}

// trainArgs returns a command line of train with the flags that are set.
func trainArgs(fs *pflag.FlagSet) []string {
	args := []string{"train"}
	fs.Visit(func(f *pflag.Flag) {
		switch {
		case f.Name == "full":
		case f.Value.Type() == "bool" && f.Value.String() == "true":
			args = append(args, "--"+f.Name)
		case f.Value.Type() == "bool":
			args = append(args, "--"+f.Name+"="+f.Value.String())
		case f.Value.String() == "" && slices.Contains([]string{"checkpoint", "lora", "batch-schedule"}, f.Name):
			args = append(args, "--"+f.Name, "none") // given as none, and stored as ""
		default:
			args = append(args, "--"+f.Name, f.Value.String())
		}
	})
	return args
}
