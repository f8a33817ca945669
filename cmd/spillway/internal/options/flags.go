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

// parsedFlag is a flag whose value parse reads into to. Help calls the value kind.
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

// frozenCacheFlag is a flag with the value none, host:SIZE or disk:SIZE.
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

// checkpointFlag is a flag with a folder, or none, which sets unkept.
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

// Disk returns a flag DIR[:SIZE] for the disk tier's folder and the cap on its use.
func Disk(dir *string, size *int64) pflag.Value { return diskFlag{dir, size} }

// likeSize matches a number followed by letters: a mistyped size, and rarely a folder's name.
var likeSize = regexp.MustCompile(`^[0-9]+([0-9.,_]* ?[A-Za-z]+)?$`)

// diskFlag is a flag DIR[:SIZE]; the last colon splits only before a size.
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

// Later holds the flags that take effect once all flags are read.
type Later struct {
	Fit         bool
	GlobalBatch int
	Export      string
	Unkept      bool // --checkpoint none: discard the trained model
}

// maxGlobalBatch bounds the search over splits of a batch; it is more rows than any step has.
const maxGlobalBatch = 1 << 20

// Refuse rejects values of the flags that no run can use.
func (l *Later) Refuse() error {
	if l.GlobalBatch > maxGlobalBatch {
		return fmt.Errorf("--global-batch %d: at most %d rows are possible", l.GlobalBatch, maxGlobalBatch)
	}
	if l.GlobalBatch < 0 {
		return fmt.Errorf("--global-batch %d: at least 1 row is needed", l.GlobalBatch)
	}
	return nil
}

// refuseAllow rejects --allow without --fit, which alone chooses a precision.
func (l *Later) refuseAllow(c *config.Config) error {
	if len(c.Allow) > 0 && !l.Fit {
		return fmt.Errorf("--allow %s is for --fit, which may choose a precision; give --fit, or --precision %[2]s", strings.Join(c.Allow, ","), c.Allow[0])
	}
	return nil
}

// Follow derives the number of micro-batches from --global-batch, --rank-shares or
// --batch-schedule. It also derives the micro-batch size where --batch is not given. The number of
// ranks must be known. With --fit the search splits the batch instead, unless --reproducible keeps
// the micro-batch.
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

// microBatch returns the rows of a micro-batch when a rank has each rows in a step. With a given
// accumulation it divides them by that. Otherwise it returns their largest divisor that is at most
// the default. Callers leave it out for reproducible runs: there a micro-batch is the leaf of the
// sums, whose size must not change with the number of ranks.
func microBatch(each int, c config.Config, accumGiven bool) int {
	if accumGiven {
		if c.Accum > 0 && each%c.Accum == 0 {
			return each / c.Accum
		}
		return c.Batch // rejected later; that error names both flags
	}
	b := min(each, c.Batch)
	for each%b != 0 {
		b--
	}
	return b
}

// OpenRows returns the rows of a step over all ranks if --batch is not given, and 0 if it is.
func (l *Later) OpenRows(fs *pflag.FlagSet) int {
	if fs.Changed("batch") {
		return 0
	}
	return l.GlobalBatch
}

// TuneDisk sets the disk tier's block size and depth as doctor measured them for its filesystem.
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

// percent is a flag such as 5%, stored as a fraction.
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

// Train binds the flags of train to c and l. A table: an entry for each flag.
func Train(fs *pflag.FlagSet, c *config.Config, l *Later) {
	d := config.Default()
	*c = d
	fs.String("config", "", "YAML `FILE` with the flags' names as keys; flags override it")
	fs.StringVar(&c.Model, "model", "", "preset `NAME` or folder with a Hugging Face config.json")
	fs.StringVar(&c.Init, "init", d.Init, "`DIR` with model.safetensors, or random")
	fs.StringVar(&c.Data, "data", "", "`PATH` of tokens (*.bin), of text or JSON lines (each also as .gz or .zst), or a folder of them")
	fs.StringVar(&c.DataGlob, "data-glob", "", "read only the files of a folder whose names match `PATTERN`")
	fs.StringVar(&c.Tokenizer, "tokenizer", d.Tokenizer, "bytes, gpt2, or a tokenizer.json `FILE` (default: the model's own)")
	fs.StringVar(&c.TextField, "text-field", "", "`NAME` of the field with the text in JSON lines (*.jsonl)")
	fs.StringVar(&c.Order, "order", "", "sequential or shuffled (default: sequential for files, shuffled for folders and conversations)")
	fs.StringVar(&c.Template, "template", "", "Jinja `FILE` that converts conversations to text (default: the model's chat_template)")
	fs.StringVar(&c.LossOn, "loss-on", "", "tokens of conversations that count in the loss: answers or all (default: answers)")
	fs.StringVar(&c.Long, "long", "", "treatment of conversations longer than --seq: cut or drop (default: cut)")
	fs.StringVar(&c.Packing, "packing", "", "conversations per row: on (as many as fit, each with separate positions and attention) or off (one) (default: on for conversations on a CPU)")
	fs.Var((*percent)(&c.EvalSplit), "eval-split", "share of conversations, or of documents of text, to hold out and evaluate, drawn by --seed, as in 5% (default: none)")
	fs.IntVar(&c.Steps, "steps", d.Steps, "optimizer steps")
	fs.IntVar(&c.Epochs, "epochs", 0, "passes through the data, instead of --steps")
	fs.IntVar(&c.Batch, "batch", d.Batch, "rows of a rank's micro-batch")
	fs.IntVar(&c.Seq, "seq", 0, "tokens of a row (default: the smaller of 256 and the model's positions)")
	fs.IntVar(&c.Accum, "accum", d.Accum, "micro-batches a step")
	fs.StringVar(&c.AccumOrder, "accum-order", d.AccumOrder, "order of a step's micro-batches: micro (one after the other) or layer (each layer runs all of them before the next layer). With layer, each layer is read and gathered once forward and once backward for any --accum, but the activations of all micro-batches stay in memory")
	fs.StringVar(&c.Optimizer, "optimizer", d.Optimizer, english.WordSeries(zero.OptimizerNames(), "or"))
	fs.Float64Var(&c.Trust, "trust", d.Trust, "trust coefficient of "+english.WordSeries(zero.NamesReading(zero.Trust), "and")+": a parameter's rate is this times its norm over its gradient's")
	fs.BoolVar(&c.AdaptAll, "adapt-all", false, english.WordSeries(zero.NamesReading(zero.AdaptAll), "and")+" also adapt the rate of parameters without weight decay, as in the papers; by default those use the plain rate (lars: times --trust)")
	fs.Float64Var(&c.LR, "lr", d.LR, "learning rate")
	fs.StringVar(&c.LRSchedule, "lr-schedule", d.LRSchedule,
		"how the learning rate changes: constant, linear, cosine or inverse-sqrt. With N steps, w of them --warmup, "+
			"x = (s-w)/(N-1-w) at step s (from 0), and min for --min-lr: linear is lr + (min-lr)x, "+
			"cosine is min + (lr-min)(1+cos πx)/2, inverse-sqrt is max(min, lr·√(w/(s+1))). "+
			"Linear and cosine reach min at the last step; Hugging Face's schedules reach it one step later")
	fs.StringVar(&c.LRScale, "lr-scale", d.LRScale, "scale --lr by a step's rows divided by --lr-base-batch: none, sqrt or linear")
	fs.IntVar(&c.LRBaseBatch, "lr-base-batch", d.LRBaseBatch, "rows of a step for which --lr-scale does not change --lr")
	fs.IntVar(&c.Warmup, "warmup", d.Warmup, "steps w of linear warm-up: step s = 0 … w-1 has lr(s+1)/w, the first lr/w; Hugging Face's has lr·s/w, so its first step changes nothing and ours is one step ahead")
	fs.Float64Var(&c.MinLR, "min-lr", d.MinLR, "final rate min of linear and cosine, lowest rate of inverse-sqrt (Hugging Face's linear and cosine end at 0); --lr-scale does not scale it")
	fs.Float64Var(&c.WeightDecay, "weight-decay", d.WeightDecay, "weight decay of parameters with 2 or more dimensions")
	fs.Float64Var(&c.Beta1, "beta1", d.Beta1, "decay of the first moment (momentum)")
	fs.BoolVar(&c.Nesterov, "nesterov", false, "Nesterov's form of momentum, with "+english.WordSeries(zero.NamesReading(zero.Nesterov), "and"))
	fs.Float64Var(&c.Beta2, "beta2", d.Beta2, "decay of the second moment")
	fs.Float64Var(&c.Eps, "eps", d.Eps, "the optimizer's epsilon")
	fs.Float64Var(&c.Clip, "clip", d.Clip, "largest global gradient norm; 0: off")
	fs.Float64Var(&c.Dropout, "dropout", d.Dropout, "dropout rate")
	fs.Int64Var(&c.Seed, "seed", d.Seed, "seed of weights, data order and dropout")
	fs.Var(cli.List(&c.Freeze, "PATTERN"), "freeze", "do not train parameters that match these patterns, separated by commas, as in h.{0-3}.*")
	fs.Var(parsedFlag[lora.Options]{&c.LoRA, "r=N,…", lora.Parse}, "lora", "train low-rank adapters of rank r and freeze the model, as in r=16, or r=16,alpha=32,targets=*.mlp.*,dropout=0. Each product whose weight matches a target gets an adapter (without targets: all products of the blocks), scaled by alpha/r (without alpha: by 2; default: none)")
	fs.StringVar(&c.Base, "base", "", "storage type of the frozen parameters with --lora: fp32, bf16 or int8 (default: --precision's)")
	fs.IntVar(&c.Threads, "threads", d.Threads, "compute threads, shared by the ranks (default: all cores)")
	fs.IntVar(&c.Prefetch, "prefetch", d.Prefetch, "units gathered ahead of their use")
	fs.StringVar(&c.Overlap, "overlap", "on", "run collectives during computation: on or off; the bits are the same (CPU ranks)")
	fs.StringVar(&c.EvalData, "eval-data", "", "held-out data `PATH`")
	fs.IntVar(&c.EvalEvery, "eval-every", 0, "steps between evaluations (default: at the end only)")
	fs.IntVar(&c.EvalSteps, "eval-steps", d.EvalSteps, "maximum batches of an evaluation; no row counts twice")
	fs.StringVar(&c.Device, "device", d.Device, "cpu, or cuda: spread the ranks over this machine's NVIDIA GPUs")
	fs.StringVar(&c.Collectives, "collectives", d.Collectives, "algorithm of CPU ranks' collectives: auto, direct, tree, halving-doubling, hierarchical or server, which all give the same bits; or ring, whose bits differ")
	fs.IntVar(&c.Ranks, "ranks", d.Ranks, "world size")
	fs.Var(cli.Size(&c.DeviceMemory), "device-memory", "cap on a rank's device memory")
	fs.Var(cli.Size(&c.HostMemory), "host-memory", "cap on a rank's host memory")
	fs.Var(Disk(&c.Disk, &c.DiskMemory), "disk", "folder of the disk tier, and a cap on a rank's use of it")
	fs.IntVar(&c.Zero, "zero", d.Zero, "ZeRO stage: 0, 1, 2 or 3; a pipeline supports 0 and 1, and its default is 1")
	fs.BoolVar(&c.Reproducible, "reproducible", false, "give the same bits at every stage and, with equal --batch and global batch, at every number of ranks: add up a step's micro-batches from left to right")
	fs.StringVar(&c.Precision, "precision", d.Precision, "fp32, bf16 or fp16")
	fs.StringVar(&c.BF16Rounding, "bf16-rounding", d.BF16Rounding, "rounding of sums of bf16 products on the CPU: native (as its bf16 instructions round) or portable (the same bits on every CPU)")
	fs.StringVar(&c.LossScale, "loss-scale", d.LossScale, "loss scale of --precision fp16: dynamic, or a fixed number")
	fs.IntVar(&c.LossScaleHysteresis, "loss-scale-hysteresis", 1, "consecutive overflows that halve a dynamic loss scale")
	fs.StringVar(&c.Reduce, "reduce", d.Reduce, "type in which gradients are reduced: same (as the gradients) or fp32")
	fs.Var(cli.List(&c.Int8, "WHAT"), "int8", "quantize to 8 bits, separated by commas: optimizer (AdamW's moments), gather (parameters sent between ranks), reduce (gradients sent between ranks), activations (saved for products), matmul (products)")
	fs.Var(cli.List(&c.Epilogues, "WHAT"), "epilogues", "operations fused into 16-bit products on a GPU that change bits: default (dgelu), none, all, or a list of dgelu (GELU's derivative), bgrad (biases' gradients, in the products for their weights' gradients), gelu (GELU, whose recomputation then repeats the product)")
	fs.StringVar(&c.OptimizerDType, "optimizer-dtype", "fp32", "type of AdamW's states: fp32, or bf16 (moments in bf16, parameters without masters; needs --stochastic-rounding)")
	fs.BoolVar(&c.StochasticRounding, "stochastic-rounding", false, "round values stored in bf16 up or down at random, so that the mean is exact")
	fs.StringVar(&c.Recompute, "recompute", "none", "activations computed again in the backward: none, selective, full, auto (as few as the cap requires), by unit as in full:h.*, or by name as in drop:h.{0-11}.mlp.act")
	fs.StringVar(&c.Offload, "offload", "", "store off the device: optimizer, parameters, gradients, activations, each =host or =disk, separated by commas; in part as in optimizer=host:60%, optimizer=host:25%+disk or activations=host:h.{0-3}.mlp.act")
	fs.Var(cli.Size(&c.DiskCache), "disk-cache", "host memory of a rank for a cache of its disk reads (default: none)")
	fs.Var(frozenCacheFlag{&c.FrozenCache}, "frozen-cache", "cache of a rank, host:SIZE or disk:SIZE, for the outputs of frozen first layers, so that later epochs skip their forward (default: none)")
	fs.BoolVar(&c.RequirePinned, "require-pinned", false, "refuse to run if host memory cannot be locked")
	fs.StringVar(&c.CUDAGraphs, "cuda-graphs", "auto", "launch sequences of a step's operations on a GPU as CUDA graphs: auto (except those that --trace times) or off")
	fs.BoolVar(&l.Fit, "fit", false, "choose the stage, prefetch, split of the batch, recomputation and offload that are not given: the fastest plan that fits")
	fs.Var(cli.List(&c.Allow, "PRECISION"), "allow", "precisions that --fit may choose besides --precision, separated by commas: bf16, fp16")
	fs.IntVar(&l.GlobalBatch, "global-batch", 0, fmt.Sprintf(
		"`ROWS` of a step over all ranks; with --batch and --ranks it determines --accum (without --batch a micro-batch "+
			"has %d rows, or the largest smaller number that divides a rank's rows; with --accum it is a rank's rows "+
			"divided by --accum; with --reproducible always %[1]d; --fit chooses it)", d.Batch))
	fs.Var(parsedFlag[config.BatchSchedule]{&c.BatchSchedule, "LIST", config.ParseBatchSchedule}, "batch-schedule", "STEP:ROWS, separated by commas: rows of a step over all ranks from that step on, instead of --global-batch. 0:32,500:64,2000:128 has 32 rows for the first 500 steps, then 64, then 128; --lr-scale scales --lr with them")
	fs.Var(cli.Counts(&c.RankShares), "rank-shares", "micro-batches of each rank in a step, for ranks that are not equally fast; needs --reproducible (default: even, shares that differ by at most one)")
	fs.StringVar(&c.OnNonFinite, "on-nonfinite", d.OnNonFinite, "action at a step with a non-finite loss or gradient: stop (status 3, naming the tensor) or skip (leave out its update; stop at the tenth in a row)")
	fs.Var(checkpointFlag{&c.Checkpoint, &l.Unkept}, "checkpoint", "`DIR` of checkpoints; none: keep nothing and do not warn (default: keep nothing)")
	fs.IntVar(&c.SaveEvery, "save-every", 0, "steps between checkpoints (default: at the end only)")
	fs.StringVar(&c.AsyncSave, "async-save", "auto", "write checkpoints in the background, from a copy of the states in host memory: auto (if the copy fits), on or off")
	fs.IntVar(&c.Keep, "keep", d.Keep, "confirmed checkpoints of this run to keep besides the newest (a later update confirms them); 0: all")
	fs.BoolVar(&c.Resume, "resume", false, "continue from the newest complete checkpoint")
	fs.StringVar(&l.Export, "export", "", "at the end write the last checkpoint's model to a new `DIR` as a Hugging Face folder")
	fs.BoolVar(&c.AcceptChanges, "accept-changes", false, "resume even if data, seed, order or the batch schedule of the completed steps differ")
	fs.DurationVar(&c.Timeout, "timeout", d.Timeout, "longest wait of a collective")
	outputFlags(fs, c)
}

// outputFlags binds the flags of a run's output files and of its metrics page.
func outputFlags(fs *pflag.FlagSet, c *config.Config) {
	fs.StringVar(&c.Metrics, "metrics", "", "write JSON lines about steps and evaluations to `FILE`")
	fs.StringVar(&c.Receipt, "receipt", "", "write a hash chain of the run to `FILE`, for spillway verify: settings that affect results, samples, rates, losses, and a hash of all states")
	fs.IntVar(&c.ReceiptEvery, "receipt-every", 0, "steps between lines of --receipt, besides those at checkpoints (default: --save-every, or 100)")
	fs.StringVar(&c.Trace, "trace", "", "write a Chrome trace to `FILE` (open it in Perfetto)")
	fs.StringVar(&c.TensorBoard, "tensorboard", "", "write an event file of the run for TensorBoard to `DIR`")
	fs.StringVar(&c.MetricsAddr, "metrics-addr", "", "serve the run's metrics to Prometheus at http://`ADDR`/metrics: HOST:PORT, or PORT for this machine only; port 0: any free port")
}
