package options

import (
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"

	"github.com/dustin/go-humanize/english"
	"github.com/spf13/pflag"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/lora"
	"github.com/spillway-ml/spillway/offload/store"
	"github.com/spillway-ml/spillway/zero"
)

// parsedFlag is a value that parse reads. kind is what help calls it.
type parsedFlag[T fmt.Stringer] struct {
	to    *T
	kind  string
	parse func(string) (T, error)
}

func (f parsedFlag[T]) Set(s string) (err error) {
	*f.to, err = f.parse(s)
	return err
}

func (f parsedFlag[T]) Type() string { return f.kind }

func (f parsedFlag[T]) String() string { return (*f.to).String() }

// frozenCacheFlag is none, host:SIZE or disk:SIZE.
type frozenCacheFlag struct{ to *config.FrozenCache }

func (f frozenCacheFlag) Set(s string) (err error) {
	*f.to, err = config.ParseFrozenCache(s, cli.ParseSize)
	return err
}

func (f frozenCacheFlag) Type() string { return "TIER:SIZE" }

func (f frozenCacheFlag) String() string {
	if f.to.Bytes == 0 {
		return ""
	}
	return fmt.Sprintf("%s:%s", f.to.Tier, cli.SizeText(f.to.Bytes))
}

// checkpointFlag is a folder, or none, which sets unkept.
type checkpointFlag struct {
	dir    *string
	unkept *bool
}

func (f checkpointFlag) Set(s string) error {
	if *f.unkept = strings.EqualFold(s, "none"); *f.unkept {
		s = ""
	}
	*f.dir = s
	return nil
}

func (f checkpointFlag) Type() string { return "string" }

func (f checkpointFlag) String() string { return *f.dir }

// Disk is the flag of the disk tier's folder and of its cap, DIR[:SIZE].
func Disk(dir *string, size *int64) pflag.Value { return diskFlag{dir, size} }

// likeSize is what a mistyped size is like, and a folder's name seldom: a number, with letters behind it.
var likeSize = regexp.MustCompile(`^[0-9]+([0-9.,_]* ?[A-Za-z]+)?$`)

// diskFlag is DIR[:SIZE]; the last colon splits only before a size.
type diskFlag struct {
	dir  *string
	size *int64
}

func (f diskFlag) Set(s string) error {
	dir, size := s, int64(0)
	if i := strings.LastIndexByte(s, ':'); i >= 0 {
		if n, err := cli.ParseSize(s[i+1:]); err == nil {
			if n == 0 {
				return fmt.Errorf("%q: a size of 0 leaves no memory at all; leave it out, as in --disk %s, for no cap", s, s[:i])
			}
			dir, size = s[:i], n
		} else if text, negative := strings.CutPrefix(s[i+1:], "-"); negative {
			if _, err := cli.ParseSize(text); err == nil {
				return fmt.Errorf("%q: a size is not negative", s)
			}
		} else if likeSize.MatchString(s[i+1:]) {
			return fmt.Errorf("%.80q: %w", s, err)
		}
	}
	if dir == "" {
		return errors.New("the folder is missing; write DIR or DIR:SIZE")
	}
	*f.dir, *f.size = dir, size
	return nil
}

func (f diskFlag) Type() string { return "DIR[:SIZE]" }

func (f diskFlag) String() string {
	if *f.dir != "" && *f.size > 0 {
		return *f.dir + ":" + cli.SizeText(*f.size)
	}
	return *f.dir
}

// Later holds flags that are acted on once all are read.
type Later struct {
	Fit         bool
	GlobalBatch int
	Export      string
	Unkept      bool // --checkpoint none: the model is not wanted
}

// maxGlobalBatch bounds what a search has to split: more rows than any step has.
const maxGlobalBatch = 1 << 20

// Refuse refuses values that no run can have.
func (l *Later) Refuse() error {
	if l.GlobalBatch > maxGlobalBatch {
		return fmt.Errorf("--global-batch %d: at most %d rows are possible", l.GlobalBatch, maxGlobalBatch)
	}
	if l.GlobalBatch < 0 {
		return fmt.Errorf("--global-batch %d: at least 1 row is needed", l.GlobalBatch)
	}
	return nil
}

// refuseAllow refuses precisions to choose from where nothing chooses.
func (l *Later) refuseAllow(c *config.Config) error {
	if len(c.Allow) > 0 && !l.Fit {
		return fmt.Errorf("--allow %s is for --fit, which may choose a precision; give --fit, or --precision %[2]s", strings.Join(c.Allow, ","), c.Allow[0])
	}
	return nil
}

// Follow makes the accumulation follow --global-batch, once the number of ranks is
// known, or --rank-shares, and the micro-batch, where it is left open. --fit splits it by
// itself, unless --reproducible keeps the micro-batch.
func (l *Later) Follow(fs *pflag.FlagSet, c *config.Config, tell io.Writer) error {
	schedule := len(c.BatchSchedule) > 0
	if l.Fit && !c.Reproducible && !schedule || l.GlobalBatch == 0 && c.RankShares == nil && !schedule {
		return nil
	}
	c.GlobalBatch = l.GlobalBatch
	rows, of := l.OpenRows(fs), fmt.Sprintf("--global-batch %d", l.GlobalBatch)
	if schedule && !fs.Changed("batch") {
		rows, of = c.BatchSchedule.Divisor(), fmt.Sprintf("--batch-schedule %.80s", c.BatchSchedule)
	}
	if each := rows / c.Ranks; each > 0 && !c.Reproducible && each*c.Ranks == rows {
		if b := microBatch(each, *c, fs.Changed("accum")); b != c.Batch {
			fmt.Fprintf(tell, "micro-batch %d: --batch is left open, for %s over %s\n", b, of, english.Plural(c.Ranks, "rank", ""))
			c.Batch = b
		}
	}
	var err error
	*c, err = c.FollowGlobalBatch(fs.Changed("accum"))
	return err
}

// microBatch is the micro-batch of each rows of a rank: what a given accumulation leaves,
// or else the largest that divides them and is not over the default. Of a reproducible run
// it is not open: its rows are the leaf of the sums, at every number of ranks.
func microBatch(each int, c config.Config, accumGiven bool) int {
	if accumGiven {
		if c.Accum > 0 && each%c.Accum == 0 {
			return each / c.Accum
		}
		return c.Batch // refused, with both named
	}
	b := min(each, c.Batch)
	for each%b != 0 {
		b--
	}
	return b
}

// OpenRows are the rows of a step over all ranks where the micro-batch was left open; 0: it
// was not.
func (l *Later) OpenRows(fs *pflag.FlagSet) int {
	if fs.Changed("batch") {
		return 0
	}
	return l.GlobalBatch
}

// TuneDisk lets the disk tier work as doctor measured its filesystem.
func TuneDisk(c *config.Config, stderr io.Writer) {
	if c.Disk == "" {
		return
	}
	measured, err := store.LoadTuning(c.Disk)
	c.DiskTuning.Block, c.DiskTuning.Depth = measured.Block, measured.Depth
	if err != nil {
		fmt.Fprintf(stderr, "warning: %v (spillway doctor --disk DIR does)\n", err)
	}
}

// percent is a flag such as 5%, kept as a share.
type percent float64

func (p *percent) String() string {
	if *p == 0 {
		return ""
	}
	return strconv.FormatFloat(100*float64(*p), 'g', -1, 64) + "%"
}
func (p *percent) Type() string { return "PERCENT%" }
func (p *percent) Set(s string) error {
	v, err := strconv.ParseFloat(strings.TrimSuffix(s, "%"), 64)
	if err != nil || !strings.HasSuffix(s, "%") || !(v >= 0 && v < 100) {
		return fmt.Errorf("a percentage of at least 0%% and below 100%% is needed, as in 5%%")
	}
	*p = percent(v / 100)
	return nil
}

// Train binds the contract's table of flags to c. A table: an entry for each flag.
func Train(fs *pflag.FlagSet, c *config.Config, l *Later) {
	d := config.Default()
	*c = d
	fs.String("config", "", "YAML `FILE` with the flags' names as keys; a flag wins")
	fs.StringVar(&c.Model, "model", "", "preset `NAME` or folder with a Hugging Face config.json")
	fs.StringVar(&c.Init, "init", d.Init, "`DIR` with model.safetensors, or random")
	fs.StringVar(&c.Data, "data", "", "`PATH` of tokens (*.bin), of text or JSON lines (each also as .gz or .zst), or a folder of them")
	fs.StringVar(&c.DataGlob, "data-glob", "", "take only a folder's files whose name matches `PATTERN`")
	fs.StringVar(&c.Tokenizer, "tokenizer", d.Tokenizer, "bytes, gpt2, or a tokenizer.json `FILE` (default: the model's own)")
	fs.StringVar(&c.TextField, "text-field", "", "the `NAME` of the field of JSON lines (*.jsonl) that holds the text")
	fs.StringVar(&c.Order, "order", "", "sequential or shuffled (default: sequential for files, shuffled for folders and conversations)")
	fs.StringVar(&c.Template, "template", "", "a Jinja `FILE` that makes text of conversations (default: the model's chat_template)")
	fs.StringVar(&c.LossOn, "loss-on", "", "what counts in the loss of conversations: answers or all (default: answers)")
	fs.StringVar(&c.Long, "long", "", "conversations longer than --seq: cut or drop (default: cut)")
	fs.StringVar(&c.Packing, "packing", "", "on: a row holds as many conversations as fit, each with its own positions and attention; off: one (default: on for conversations on a CPU)")
	fs.Var((*percent)(&c.EvalSplit), "eval-split", "conversations, or documents of text, that are held out and evaluated, drawn by --seed, as in 5% (default: none)")
	fs.IntVar(&c.Steps, "steps", d.Steps, "optimizer steps")
	fs.IntVar(&c.Epochs, "epochs", 0, "passes through the data, in place of --steps")
	fs.IntVar(&c.Batch, "batch", d.Batch, "rows of a micro-batch, a rank")
	fs.IntVar(&c.Seq, "seq", 0, "tokens of a row (default: the smaller of 256 and the model's positions)")
	fs.IntVar(&c.Accum, "accum", d.Accum, "micro-batches a step")
	fs.StringVar(&c.AccumOrder, "accum-order", d.AccumOrder, "micro: a step's micro-batches one after the other; or layer: each layer runs all of them before the next, so that it is read and gathered once forward and once backward whatever --accum is, for the memory of their activations")
	fs.StringVar(&c.Optimizer, "optimizer", d.Optimizer, english.WordSeries(zero.OptimizerNames(), "or"))
	fs.Float64Var(&c.Trust, "trust", d.Trust, "trust coefficient of "+english.WordSeries(zero.NamesReading(zero.Trust), "and")+": a parameter's rate is this times its norm over its gradient's")
	fs.BoolVar(&c.AdaptAll, "adapt-all", false, english.WordSeries(zero.NamesReading(zero.AdaptAll), "and")+" adapt parameters without weight decay too, as in the papers; by default those take the rate as it is (with --trust: times that)")
	fs.Float64Var(&c.LR, "lr", d.LR, "learning rate")
	fs.StringVar(&c.LRSchedule, "lr-schedule", d.LRSchedule,
		"how the learning rate changes: constant, linear, cosine or inverse-sqrt. With N steps, w of them --warmup, "+
			"x = (s-w)/(N-1-w) at step s (from 0), and min for --min-lr: linear is lr + (min-lr)x, "+
			"cosine is min + (lr-min)(1+cos πx)/2, inverse-sqrt is max(min, lr·√(w/(s+1))). "+
			"Linear and cosine reach min at the last step; Hugging Face's schedules reach it one step later")
	fs.StringVar(&c.LRScale, "lr-scale", d.LRScale, "scale --lr by the rows of the step over --lr-base-batch, 256 if it is not given: none, sqrt or linear")
	fs.IntVar(&c.LRBaseBatch, "lr-base-batch", d.LRBaseBatch, "rows of a step at which --lr-scale leaves --lr as it is")
	fs.IntVar(&c.Warmup, "warmup", d.Warmup, "steps w of linear warm-up: step s = 0 … w-1 has lr(s+1)/w, the first lr/w; Hugging Face's has lr·s/w, so its first step moves nothing and ours is one step ahead")
	fs.Float64Var(&c.MinLR, "min-lr", d.MinLR, "rate min that linear and cosine end at, and inverse-sqrt never falls below (Hugging Face's linear and cosine end at 0); --lr-scale does not scale it")
	fs.Float64Var(&c.WeightDecay, "weight-decay", d.WeightDecay, "on parameters of 2 or more dimensions")
	fs.Float64Var(&c.Beta1, "beta1", d.Beta1, "decay of the first moment (momentum)")
	fs.BoolVar(&c.Nesterov, "nesterov", false, "Nesterov's form of momentum, with "+english.WordSeries(zero.NamesReading(zero.Nesterov), "and"))
	fs.Float64Var(&c.Beta2, "beta2", d.Beta2, "decay of the second moment")
	fs.Float64Var(&c.Eps, "eps", d.Eps, "the optimizer's epsilon")
	fs.Float64Var(&c.Clip, "clip", d.Clip, "largest global gradient norm; 0: off")
	fs.Float64Var(&c.Dropout, "dropout", d.Dropout, "dropout rate")
	fs.Int64Var(&c.Seed, "seed", d.Seed, "seed of weights, data order and dropout")
	fs.Var(cli.List(&c.Freeze, "PATTERN"), "freeze", "parameters that are not trained: patterns, separated by commas, as in h.{0-3}.*")
	fs.Var(parsedFlag[lora.Options]{&c.LoRA, "r=N,…", lora.Parse}, "lora", "train low-rank adapters of rank r in the model's place, as in r=16, or r=16,alpha=32,targets=*.mlp.*,dropout=0: beside each product whose weight a target names (without targets: all of the blocks'), scaled by alpha/r (without alpha: by 2; default: none)")
	fs.StringVar(&c.Base, "base", "", "what the frozen parameters of --lora rest in: fp32, bf16 or int8 (default: --precision's)")
	fs.IntVar(&c.Threads, "threads", d.Threads, "computing threads, shared by the ranks (default: all cores)")
	fs.IntVar(&c.Prefetch, "prefetch", d.Prefetch, "units gathered ahead of their use")
	fs.StringVar(&c.Overlap, "overlap", "on", "on: collectives run beside computation; off: the two take turns; both give the same bits (CPU ranks)")
	fs.StringVar(&c.EvalData, "eval-data", "", "held-out data `PATH`")
	fs.IntVar(&c.EvalEvery, "eval-every", 0, "steps between evaluations (default: at the end only)")
	fs.IntVar(&c.EvalSteps, "eval-steps", d.EvalSteps, "batches of an evaluation at most: no row counts twice")
	fs.StringVar(&c.Device, "device", d.Device, "cpu, or cuda: this machine's NVIDIA GPUs, over which the ranks are spread")
	fs.StringVar(&c.Collectives, "collectives", d.Collectives, "how CPU ranks gather and sum: auto, direct, tree, halving-doubling, hierarchical or server, which all give the same bits; or ring, which gives others")
	fs.IntVar(&c.Ranks, "ranks", d.Ranks, "world size")
	fs.Var(cli.Size(&c.DeviceMemory), "device-memory", "cap on a rank's device memory")
	fs.Var(cli.Size(&c.HostMemory), "host-memory", "cap on a rank's host memory")
	fs.Var(Disk(&c.Disk, &c.DiskMemory), "disk", "folder of the disk tier, and a cap on a rank's use of it")
	fs.IntVar(&c.Zero, "zero", d.Zero, "ZeRO stage: 0, 1, 2 or 3; a pipeline has 0 and 1 only, and 1 where it is not given")
	fs.BoolVar(&c.Reproducible, "reproducible", false, "the same bits at every stage and, of the same --batch and global batch, at every number of ranks: sums go over the micro-batches of a step from left to right")
	fs.StringVar(&c.Precision, "precision", d.Precision, "fp32, bf16 or fp16")
	fs.StringVar(&c.BF16Rounding, "bf16-rounding", d.BF16Rounding, "how sums of bf16 products round on the CPU: native, as its bf16 instructions do, or portable, the same bits on every CPU")
	fs.StringVar(&c.LossScale, "loss-scale", d.LossScale, "of --precision fp16: dynamic, or a number that stays")
	fs.IntVar(&c.LossScaleHysteresis, "loss-scale-hysteresis", 1, "overflows in a row that halve a dynamic loss scale")
	fs.StringVar(&c.Reduce, "reduce", d.Reduce, "dtype of gradients on the way: same or fp32")
	fs.Var(cli.List(&c.Int8, "WHAT"), "int8", "what is in 8 bits, of: optimizer (AdamW's moments), gather (parameters between ranks), reduce (gradients between ranks), activations (saved for products), matmul (products)")
	fs.Var(cli.List(&c.Epilogues, "WHAT"), "epilogues", "what 16-bit products on a GPU do besides multiplying, of what changes bits: default (dgelu), none, all, or of: dgelu (GELU's derivative), bgrad (biases' gradients, in the products of their weights'), gelu (GELU, whose recomputation then takes the product)")
	fs.StringVar(&c.OptimizerDType, "optimizer-dtype", "fp32", "what AdamW keeps: fp32, or bf16 (moments, and parameters without masters; with --stochastic-rounding)")
	fs.BoolVar(&c.StochasticRounding, "stochastic-rounding", false, "round what rests in bf16 up or down by chance, so that the mean is exact")
	fs.StringVar(&c.Recompute, "recompute", "none", "activations computed again in the backward: none, selective, full, auto (as few as the cap asks for), by unit as in full:h.*, or by name as in drop:h.{0-11}.mlp.act")
	fs.StringVar(&c.Offload, "offload", "", "what rests off the device: optimizer, parameters, gradients, activations, each =host or =disk, separated by commas; in part as in optimizer=host:60%, optimizer=host:25%+disk or activations=host:h.{0-3}.mlp.act")
	fs.Var(cli.Size(&c.DiskCache), "disk-cache", "host memory of a rank that holds what would be read from disk (default: none)")
	fs.Var(frozenCacheFlag{&c.FrozenCache}, "frozen-cache", "room of a rank, host:SIZE or disk:SIZE, for what frozen first layers hand on, so that later epochs skip their forward (default: none)")
	fs.BoolVar(&c.RequirePinned, "require-pinned", false, "refuse to run on host memory that cannot be locked")
	fs.StringVar(&c.CUDAGraphs, "cuda-graphs", "auto", "launch runs of a step's operations on a GPU as CUDA graphs: auto (but for those that --trace times) or off")
	fs.BoolVar(&l.Fit, "fit", false, "choose what was not given: the fastest that fits")
	fs.Var(cli.List(&c.Allow, "PRECISION"), "allow", "precisions that --fit may choose beside --precision, separated by commas: bf16, fp16")
	fs.IntVar(&l.GlobalBatch, "global-batch", 0, fmt.Sprintf(
		"`ROWS` of a step over all ranks: --accum follows from it, --batch and --ranks (without --batch a micro-batch "+
			"has %d rows, or the largest smaller number that divides a rank's rows; with --accum it is a rank's rows "+
			"divided by that; with --reproducible always %[1]d; --fit chooses)", d.Batch))
	fs.Var(parsedFlag[config.BatchSchedule]{&c.BatchSchedule, "LIST", config.ParseBatchSchedule}, "batch-schedule", "STEP:ROWS, separated by commas: rows of a step over all ranks from a step on, in the place of --global-batch, as in 0:32,500:64,2000:128: 32 rows until 500 steps are done, and so on; --lr-scale scales --lr with them")
	fs.Var(cli.Counts(&c.RankShares), "rank-shares", "micro-batches of each rank in a step, for ranks that are not equally fast; needs --reproducible (default: even, shares that differ by at most one)")
	fs.StringVar(&c.OnNonFinite, "on-nonfinite", d.OnNonFinite, "what a step with a non-finite loss or gradient does: stop (status 3, the tensor named) or skip (its update is left out; the tenth in a row stops)")
	fs.Var(checkpointFlag{&c.Checkpoint, &l.Unkept}, "checkpoint", "`DIR` of checkpoints; none: keep nothing, without a warning (default: keep nothing)")
	fs.IntVar(&c.SaveEvery, "save-every", 0, "steps between checkpoints (default: at the end only)")
	fs.StringVar(&c.AsyncSave, "async-save", "auto", "write checkpoints while the steps go on, from a copy of the states in host memory: auto (where there is room for it), on or off")
	fs.IntVar(&c.Keep, "keep", d.Keep, "confirmed checkpoints of this run kept, beside the newest; 0: all")
	fs.BoolVar(&c.Resume, "resume", false, "continue from the newest whole checkpoint")
	fs.StringVar(&l.Export, "export", "", "new `DIR` for the last checkpoint's model as a Hugging Face folder, written at the run's end")
	fs.BoolVar(&c.AcceptChanges, "accept-changes", false, "resume with other data, another seed, another order or another batch schedule of the steps that are done")
	fs.DurationVar(&c.Timeout, "timeout", d.Timeout, "longest wait of a collective")
	outputFlags(fs, c)
}

// outputFlags binds the files and the page that a run writes beside its checkpoints.
func outputFlags(fs *pflag.FlagSet, c *config.Config) {
	fs.StringVar(&c.Metrics, "metrics", "", "JSON lines `FILE`")
	fs.StringVar(&c.Receipt, "receipt", "", "`FILE` for a hash chain of the run, which spillway verify checks: what results depend on, samples, rates, losses, and a hash of all states")
	fs.IntVar(&c.ReceiptEvery, "receipt-every", 0, "steps between lines of --receipt, beside those of checkpoints (default: --save-every, or 100)")
	fs.StringVar(&c.Trace, "trace", "", "Chrome trace `FILE` (open it in Perfetto)")
	fs.StringVar(&c.TensorBoard, "tensorboard", "", "`DIR` for an event file of the run that TensorBoard shows")
	fs.StringVar(&c.MetricsAddr, "metrics-addr", "", "serve the run's metrics to Prometheus at http://`ADDR`/metrics: HOST:PORT, or a port of this machine alone; port 0: any")
}
