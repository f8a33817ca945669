// Package config has the configuration of a run: its fields with their defaults, their validation,
// and values derived from them alone. It reads no file and no device, so it compiles for any
// system; package train adds the values from a model's folder.
package config

import (
	"fmt"
	"runtime"
	"strings"
	"time"
	"unicode"

	"github.com/dustin/go-humanize/english"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/lora"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/recompute"
)

// Config is the configuration of a training run. Default returns the values that the command
// line starts from; the zero value is not valid.
type Config struct {
	// Model is a preset's name or a folder with a Hugging Face config.json.
	Model string
	// Own is what the program itself provides: a model, data, an optimizer, a schedule.
	Own Own
	// Init is "random" or a folder with model.safetensors (or its sharded index).
	Init string
	// Data is a token file (*.bin), a text file, a folder of text files, or conversations:
	// JSON lines or Parquet with messages, prompt and response, or instruction and output.
	Data string
	// DataGlob limits a folder to files whose name matches; "" takes all. EvalGlob
	// is the same for EvalData.
	DataGlob, EvalGlob string
	// Tokenizer is "bytes", "gpt2" or a Hugging Face tokenizer.json. "" is the model's own
	// tokenizer; it is an error if the run reads text and the model has none.
	Tokenizer string
	// TextField is the field of JSON lines (*.jsonl) or Parquet that holds their text.
	TextField string
	Chat      // how conversations are used
	// Order is "sequential", "shuffled", or "" for sequential on files and
	// shuffled on folders.
	Order string

	Steps int // optimizer steps
	// Epochs, if not 0, is how often the run goes through the data. Steps, which may
	// be 0, is then computed from it; the last step may begin another epoch.
	Epochs int
	Batch  int // rows of a micro-batch of one rank
	Seq    int // tokens of a row; 0: the smaller of 256 and the model's positions
	Accum  int // micro-batches per step
	// AccumOrder is "micro" (or ""), which runs a step's micro-batches one after the other, or
	// "layer", which runs all of them through each block before the next block. In layer order
	// a block is read and gathered once in the forward and once in the backward, whatever Accum
	// is, but the activations of all micro-batches need memory. The bits are those of stages 0
	// and 1 in micro order, except for parameters that several blocks use (see
	// plan.Plan.OwnSums).
	AccumOrder string

	Optimizer   string  // one of zero.OptimizerNames: adamw, sgd, …
	LR          float64 // peak learning rate
	LRSchedule  string  // constant, linear, cosine, inverse-sqrt
	LRScale     string  // none, sqrt, linear: multiplies LR by 1, √x or x, where x is a step's rows over LRBaseBatch
	LRBaseBatch int     // rows at which LR holds unscaled
	Warmup      int     // steps of linear warm-up
	MinLR       float64 // floor of the decaying schedules
	WeightDecay float64 // on parameters of 2 or more dimensions
	Beta1       float64 // decay of the first moment; momentum of SGD, LARS, LARC
	Beta2       float64
	Eps         float64
	// Trust is the trust coefficient η of LARS and LARC (zero.Rule.Trust): a parameter's
	// rate is η times its norm over its gradient's.
	Trust float64
	// AdaptAll makes LAMB, LARS and LARC adapt the rate of parameters without weight decay
	// (biases, norms) too, as in their papers. A bias that starts at zero then hardly moves
	// under LAMB, and gets the unscaled rate under LARS.
	AdaptAll bool
	// Nesterov makes momentum look ahead: the step is the gradient plus Beta1 times the new
	// momentum. It applies to SGD, LARS and LARC, with Beta1 above 0.
	Nesterov bool
	Clip     float64 // largest global gradient norm; 0: off

	Dropout float64  // of residual branches and embeddings
	Seed    int64    // of initial weights, data order and dropout
	Freeze  []string // patterns of parameter names that are not trained
	// LoRA adds low-rank adapters to the products whose weights its Targets name. The
	// adapters are trained; the model's own parameters are frozen. The zero value is none.
	LoRA lora.Options
	// Base is the type in which LoRA's frozen parameters are stored: "" (that of Precision),
	// "fp32", "bf16" or "int8", which has codes and one scale per 256 of them. If it differs
	// from Precision's type, a block's parameters are converted when the block is used.
	Base     string
	Threads  int // computing threads of the process, shared by its ranks; 0: all cores
	Prefetch int // units gathered ahead of use; more hides communication and costs memory
	// Overlap is "on" (or ""), which runs collectives and computation concurrently, or "off",
	// which runs them in turn. Off is slower, has the same bits, and shows what overlap gains.
	// CPU ranks only.
	Overlap string

	// Inference makes the run only evaluate (EvalData, all of it) or generate (Generate). It
	// needs no Data, and plans no gradients and no optimizer.
	Inference bool

	EvalData  string // held-out data, as Data; "" turns evaluation off
	EvalEvery int    // steps between evaluations; 0: at the end only
	EvalSteps int    // batches of an evaluation at most; no row counts twice

	Device       string // cpu, or cuda: the GPUs that the driver shows, one per rank or shared by consecutive ranks
	Ranks        int    // world size
	DeviceMemory int64  // bytes of device memory per rank; 0: no cap
	HostMemory   int64  // bytes of host memory per rank; 0: no cap
	Disk         string // folder of the disk tier
	DiskMemory   int64  // bytes of the disk tier per rank; 0: no cap
	// DiskTuning is the block size and queue depth of the disk tier, as measured on the file
	// system of Disk (spillway doctor); zero: the defaults.
	DiskTuning DiskTuning
	// DiskCache is a cache in host memory for the disk tier, in bytes per rank; 0: none. It is
	// outside the plan but counts within HostMemory. Each step reads everything on disk once, so a
	// cache of a tenth of that size saves up to a tenth of the reads.
	DiskCache int64
	// FrozenCache caches the outputs of the model's frozen first layers (Freeze), by sample, so
	// that later epochs skip their forward. The bits stay the same. The cache is outside the
	// arenas and counts against its tier's cap.
	FrozenCache FrozenCache
	// RequirePinned refuses to run if host memory can't be locked. Otherwise the run continues
	// with unlocked memory, and Warn says so.
	RequirePinned bool
	// CUDAGraphs says whether a step's operations are launched as CUDA graphs on GPUs. Graphs
	// take less host time and a little device memory, which is in the plan; the bits are the
	// same. "auto" (or "") uses them for sequences of compute-stream operations without events
	// in between, unless Trace or Measure times each operation; "off" never does.
	CUDAGraphs string
	// Planned is called with the plan of an accepted run before any of its memory is allocated;
	// nil: not called.
	Planned func(*plan.Plan)
	// Warn is called with notes about the machine for the user, one line per call; nil drops
	// them.
	Warn func(string)

	// Outside is a rank's memory need outside its arena, in bytes by memory space (a GPU's
	// context and libraries). The plan adds the host memory that the process itself needs; both
	// count against the caps.
	Outside [graph.NumSpaces]int64
	// LocalRanks is how many ranks share a process; 0: all.
	LocalRanks int
	// Target describes the device's kernels and alignment to the passes; the zero value means
	// that of Device. Plans for a GPU set it.
	Target graph.Target
	// Precision is "fp32" (or ""), "bf16" or "fp16". ShardSize shards over groups of this many
	// consecutive ranks and replicates over the groups (HSDP); 0 shards over all. Both can be
	// planned; New refuses combinations that cannot run yet.
	Precision string
	ShardSize int
	// Tensor is the number of neighbouring ranks that share the computation of every layer and have
	// the same data; 0 or 1: none. Each of them has a part of each matrix and of the values
	// computed with it. All of them exchange sums in every layer.
	Tensor int
	// TensorSlices is the number of slices, a power of two, into which a layer is cut; 0: as many
	// as Tensor. Sums over slices have a fixed order, so every Tensor that divides TensorSlices
	// gives the same bits, 1 included. More slices than ranks make smaller products.
	TensorSlices int
	// Pipeline is the number of stages over which the layers are divided; 0 or 1: one. All stages
	// have the same number of ranks, and each sends the next one's inputs. PipelineSchedule is the
	// order in which stages compute the micro-batches of a step (Accum), "1f1b" (or "") or "gpipe".
	// Stages lists the layers of each stage, as in "0-5,6-11"; "": divided by predicted FLOPs.
	Pipeline                 int
	PipelineSchedule, Stages string
	// Collectives is the algorithm of all-gathers, reduce-scatters and all-reduces of CPU ranks, an
	// algorithm.Name of package comm/algorithm; "" means auto. All algorithms but ring give the
	// same bits.
	Collectives string
	// PerHost is how many consecutive ranks each host has, if all hosts have the same number;
	// 0: unknown. The run fills it in.
	PerHost int
	// Reduce is the type in which gradients of a 16-bit precision are communicated and stored:
	// "same" (or ""), that of Precision, or "fp32".
	Reduce string
	// LossScale multiplies the loss before the backward of fp16, so that small gradients do not
	// become zero. "dynamic" (or "") starts at 65536 and doubles, up to 2^126, after 2,000
	// updates in a row without an overflow. A step whose gradients overflow is skipped and
	// halves the scale, down to 1. A number is a constant scale.
	LossScale string
	// LossScaleHysteresis is the number of overflows in a row after which a dynamic loss scale
	// is halved; 1 (or 0) halves at once. Overflowing steps are always skipped. A larger number
	// keeps the scale through a single outlier, but wastes steps if the scale is too large. A
	// clean step resets the count, so rare outliers never lower the scale. (Megatron-LM's count
	// survives clean steps until the scale has grown.)
	LossScaleHysteresis int
	// Int8 lists the data that is stored or computed in 8 bits. "optimizer" is AdamW's moments, in
	// blocks of 256 elements with the dynamic map. The others use int8 codes with scales: "gather",
	// parameters sent between ranks, and "reduce", gradients sent between ranks, both in blocks of
	// 256; "activations", those that the backward reads only in products and activations'
	// gradients, by row; "matmul", both factors of forward products and of gradients of inputs, by
	// row and column. gather and matmul need a 16-bit Precision. Bits stay the same at every stage.
	// Each replaces 16-bit data at half the size and loses precision (docs/decisions/precision.md).
	Int8 []string
	// Epilogues lists operations that 16-bit products on a GPU do in their epilogue and that change
	// bits. "dgelu" applies GELU's derivative before the product is rounded. "bgrad" sums a bias's
	// gradient in the product of its weight's gradient. "gelu" applies GELU before rounding;
	// recomputation then needs the product again (docs/decisions/gpu.md). nil or "default" means
	// dgelu where a product can have it; "none" makes each a separate operation; "all" selects all.
	// One choice gives the same bits at every stage. None of this has been measured on a GPU.
	Epilogues []string
	// OptimizerDType is the type of AdamW's states: "fp32" (or ""), or "bf16". With "bf16" the
	// moments are in bf16 and, with Precision bf16, parameters have no master: 6 bytes a parameter
	// instead of 14. It needs StochasticRounding, without which small updates would be lost.
	OptimizerDType string
	// StochasticRounding rounds values stored in bf16 so that their mean over many updates is
	// exact. The random bits depend on the seed, the parameter's name, the element and the
	// update's number, so they are the same at every stage.
	StochasticRounding bool
	// BF16Rounding is how sums of bf16 products round on the CPU. "native" (or "") rounds as
	// the CPU's bf16 instructions do (AMX, AVX-512). "portable" rounds as float32 does, with
	// the same bits on every CPU.
	BF16Rounding string
	// Recompute drops activations and computes them again in the backward: none, selective, full,
	// policies by unit or buffers by name (see package recompute), or auto. auto drops as few
	// buffers as the cap on device memory requires, first those that save the most bytes per second
	// of recomputation. It needs less memory and more computing, and gives the same bits.
	Recompute string
	// Allow lists precisions that a search may choose beside Precision.
	Allow []string

	// Offload says which classes are stored in host memory or on disk:
	// "optimizer=host|disk,parameters=…,gradients=…,activations=…", each with a share or names (see
	// offload.Parse); "" means none. It needs less device memory and more copies, and gives the
	// same bits.
	Offload string

	// OnNonFinite says what happens at a step whose loss or gradient norm is not finite. "stop"
	// (or "") ends the run with a *Diverged; "skip" skips its update on all ranks, and stops at
	// the tenth such step in a row.
	OnNonFinite string

	Zero int // ZeRO stage
	// Reproducible makes the bits depend only on the step's micro-batches of Batch rows, not on
	// the number of ranks or the stage: gradients and losses are added over the micro-batches
	// from left to right. An evaluation then takes EvalSteps times as many micro-batches as a
	// step.
	Reproducible bool
	// GlobalBatch is the number of rows of a step over all ranks, from which Accum is computed
	// (FollowGlobalBatch); 0: Accum is used as given. With Reproducible the ranks need not
	// divide it: each rank gets a share of its micro-batches, and padding fills the last one.
	GlobalBatch int
	// BatchSchedule is the number of rows of a step over all ranks, by step. It replaces
	// GlobalBatch, which becomes its largest value; nil: all steps have the same number.
	BatchSchedule BatchSchedule
	// RankShares are the numbers of micro-batches of each rank in a step, at least 1, for ranks
	// of different speeds (Reproducible); nil: shares that differ by at most one.
	RankShares []int

	Checkpoint string // folder; "" writes none
	// CheckpointMark, if not empty, marks this run's checkpoints as replaceable by a later run
	// with the same mark. Such a run may start in a folder whose checkpoints all have the mark,
	// and removes them once its own first one is complete.
	CheckpointMark string

	SaveEvery int // steps between checkpoints; 0: at the end only
	// AsyncSave says whether a save stalls training only while the states are copied to host
	// memory, and is written during the next steps. "auto" (or "") does so if each rank's cap
	// and the machine have room for the copy beside the plan; "on" makes the copy part of the
	// plan; "off" never does.
	AsyncSave string
	Keep      int  // confirmed checkpoints of this run kept, beside the newest; 0: all
	Resume    bool // continue from the newest complete checkpoint; if there is none, start
	// AcceptChanges lets a resumed run continue with other data, another seed or another order
	// than the checkpoint's run had.
	AcceptChanges bool

	Timeout time.Duration // of any collective
	// Metrics is a file of JSON lines; "": none. The command, or OpenMetrics, writes it; New only
	// checks that it may be overwritten.
	Metrics  string
	Receipts        // the run's hash chain
	Trace    string // Chrome trace file; "" writes none
	// PeakFlops is the highest measured FLOP/s of this process's devices; StepResult.FlopsShare
	// and a trace's operations are shares of it. 0: unknown.
	PeakFlops float64
	// TensorBoard is a folder for event files, MetricsAddr HOST:PORT of a page for
	// Prometheus; "": none. The command writes and serves them.
	TensorBoard, MetricsAddr string
	// Measure times collectives: StepResult.Comm and Overlap.
	Measure bool

	// Generate makes the plan cover text generation (a sample after training).
	Generate bool
	// shared holds the data that the plans of this configuration's copies share; nil: each plan is
	// made separately.
	shared *Shared
	// processes are the processes that the ranks run in; nil: only this one.
	processes Processes
}

// DiskTuning sets how the disk tier reads and writes. Zero values are the defaults.
type DiskTuning struct {
	Block int // bytes per read or write
	Depth int // concurrent reads and writes
}

// Processes are the processes of a run's job, including this one: a *Job.
type Processes interface {
	// Count is the number of processes; 0: there is no job.
	Count() int
	// Seat sets the number of ranks that each process runs.
	Seat(ranks int)
	// Memory returns the memory of the host that has the least for each rank, given the ranks per
	// process.
	Memory(ranks int) HostMemory
	// Outside returns the host memory, in bytes, that the transport needs in each process outside
	// its ranks' arenas. copies tells whether other ranks' data are copied into this process's
	// memory while they are added.
	Outside(ranks int) (bytes int64, copies bool)
}

// HostMemory is the memory that the ranks of a host share.
type HostMemory struct {
	Host  string // "": this machine
	Bytes int64  // bytes that its processes may use; 0: unknown
	Ranks int    // how many share it
}

// Share returns each rank's part in bytes; 0: unknown.
func (m HostMemory) Share() int64 { return m.Bytes / int64(max(m.Ranks, 1)) }

// Holds tells whether ranks of the given bytes each, any int64, are within the memory, or the
// memory is unknown.
func (m HostMemory) Holds(rank int64) bool { return m.Bytes == 0 || rank <= m.Share() }

func (m HostMemory) String() string {
	where := "this machine"
	if m.Host != "" {
		where = "host " + m.Host
	}
	return fmt.Sprintf("%s of %s for %s", plan.Bytes(m.Bytes), where, english.Plural(m.Ranks, "rank", ""))
}

// Over returns the configuration of a run over the processes of a job that this process leads. Each
// process runs LocalRanks ranks, at least one. Without a job it returns c.
func (c Config) Over(p Processes) Config {
	if p == nil || p.Count() == 0 {
		return c
	}
	c.LocalRanks = max(c.LocalRanks, 1)
	c.Ranks = p.Count() * c.LocalRanks
	p.Seat(c.LocalRanks)
	return c.Within(p)
}

// Within returns the configuration of a run whose ranks run in these processes.
func (c Config) Within(p Processes) Config {
	c.processes = p
	return c
}

// Processes returns the processes that the ranks run in; nil: only this one.
func (c *Config) Processes() Processes { return c.processes }

// Default returns the documented defaults; the demo has its own.
func Default() Config {
	return Config{
		Init: "random", Steps: 100, Batch: 4, Accum: 1, AccumOrder: MicroOrder,
		Optimizer: "adamw", LR: 1e-3, LRSchedule: "constant", LRScale: "none", LRBaseBatch: 256, WeightDecay: 0.1, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Trust: 1e-3,
		Seed: 1, Prefetch: 1, OnNonFinite: "stop", Precision: "fp32", BF16Rounding: "native", Reduce: "same", LossScale: DynamicScale, EvalSteps: 10, Device: "cpu", Collectives: "auto", Ranks: 1, Zero: 3, Keep: 0, Timeout: 60 * time.Second,
	}
}

// The valid values of fields, for Validate's errors.
var (
	lrSchedules = []string{"constant", "linear", "cosine", "inverse-sqrt"}
	lrScales    = []string{"none", "sqrt", "linear"}
	orders      = []string{"", "sequential", "shuffled"}
	precisions  = []string{"", "fp32", "bf16", "fp16"}
	reduces     = []string{"", "same", "fp32"}
	devices     = []string{"cpu", "cuda"}
	nonFinites  = []string{"", "stop", "skip"}
	accumOrders = []string{"", MicroOrder, LayerOrder}
)

// Values of Config.AccumOrder.
const (
	MicroOrder = "micro"
	LayerOrder = "layer"
)

// Values of Config.AsyncSave.
const (
	asyncAuto = "auto"
	AsyncOn   = "on"
	AsyncOff  = "off"
)

var asyncSaves = []string{"", asyncAuto, AsyncOn, AsyncOff}

// InLayers says whether each block runs all micro-batches before the next block starts. With
// one micro-batch there is no difference.
func (c *Config) InLayers() bool { return c.Accum > 1 && c.AsksLayers() }

// StageOfBits returns the lowest ZeRO stage with the bits of Config.Zero; matters is false if all
// stages have the same bits.
func (c *Config) StageOfBits() (stage int, matters bool) {
	switch {
	case c.Reproducible:
		return 0, false
	case c.ShardSize > 0:
		return c.Zero, true
	case c.Accum == 1 || c.InLayers():
		return 0, false
	}
	return c.Zero / 2 * 2, true
}

func (c *Config) AsksLayers() bool { return strings.EqualFold(c.AccumOrder, LayerOrder) }

// largest bounds counts, so that products of them do not overflow and no machine is asked for
// impossible sizes. Other fields are bounded through the values that they multiply.
var largest = map[string]int64{
	"Steps": 1 << 40, "Epochs": 1 << 20, "Warmup": 1 << 40, "EvalSteps": 1 << 40,
	"Batch": 1 << 24, "Seq": 1 << 24, "Accum": 1 << 24, "Ranks": 1 << 20, "LRBaseBatch": 1 << 40,
	"Threads": 4096, "Prefetch": 1 << 30,
}

// asGiven formats a value for an error: at most 80 characters, quoted if it is longer or has
// invisible characters.
func asGiven(v string) string {
	if len(v) <= 80 && !strings.ContainsFunc(v, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return v
	}
	return fmt.Sprintf("%.80q", v)
}

func oneOf(field, v string, names []string) error {
	for _, n := range names {
		if strings.EqualFold(v, n) {
			return nil
		}
	}
	var known []string
	for _, n := range names {
		if n != "" {
			known = append(known, n)
		}
	}
	return Refuse("Config.%s %.80q is not known; use one of %s", field, v, strings.Join(known, ", "))
}

func (c *Config) RecomputeAuto() bool {
	return strings.EqualFold(strings.TrimSpace(c.Recompute), recompute.Auto)
}

func (c *Config) PrecisionName() string {
	if c.Precision == "" {
		return "fp32"
	}
	return c.Precision
}

// Reduce32 says whether gradients are communicated in fp32 although values have 16 bits. In
// fp32 there is no choice.
func (c *Config) Reduce32() bool {
	return strings.EqualFold(c.Reduce, "fp32") && !strings.EqualFold(c.PrecisionName(), "fp32")
}

// DeviceTarget returns the description of the device for the passes.
func (c *Config) DeviceTarget() graph.Target {
	switch {
	case c.Target != (graph.Target{}):
		return c.Target
	case strings.EqualFold(c.Device, "cuda"):
		return graph.CUDATarget()
	}
	return graph.CPUTarget()
}

// ComputeThreads returns the computing threads of the process.
func (c *Config) ComputeThreads() int {
	if c.Threads > 0 {
		return c.Threads
	}
	return runtime.GOMAXPROCS(0)
}

// ReadsText says whether the run converts text to tokens or tokens to text.
func (c *Config) ReadsText() bool {
	isText := func(path string) bool { return path != "" && !strings.HasSuffix(path, ".bin") }
	return c.Generate || isText(c.Data) || isText(c.EvalData)
}

// Receipts configures the receipt, which is the hash chain of a run.
type Receipts struct {
	// Receipt is the receipt file; "" writes none. It records what the results depend on, and
	// every ReceiptEvery steps the data, learning rates and losses since the last line, with a
	// hash of all states. The chain is the same at every stage and, with Reproducible, at every
	// number of ranks. With Resume, "" continues the receipt that the checkpoint names, if it
	// names one.
	Receipt string
	// ReceiptEvery is the number of steps between lines; 0: SaveEvery, or 100 if that is 0 too.
	// Each checkpoint also has a line.
	ReceiptEvery int
}

// DynamicScale is the value of Config.LossScale for a scale that adapts to overflows.
const DynamicScale = "dynamic"

// Chat says how conversations in Config.Data are used; EvalSplit applies to other text too.
// Rows have Config.Seq tokens.
type Chat struct {
	// Template is a file with a Jinja template; "" is the model's chat_template.
	Template string
	// LossOn is "answers" (or ""), which counts only the assistant's answers in the loss, or
	// "all", which counts every token.
	LossOn string
	// Long is "cut" (or ""), which cuts a conversation longer than Config.Seq at its end, or
	// "drop", which leaves it out.
	Long string
	// Packing is "on", which packs as many conversations into a row as fit, each with its own
	// positions and attention, or "off", one per row. "" is on for conversations on a CPU.
	Packing string
	// EvalSplit is the share, below 1, of the conversations or text documents (files, or
	// records) that are held out for evaluation, drawn by Config.Seed; 0: none.
	EvalSplit float64
}

// BatchFrom sets the number of rows per step, over all ranks, from one step on.
type BatchFrom struct {
	Step int // steps done before the first step with these rows
	Rows int
}

// BatchSchedule is the number of rows of a step by the number of steps done before it. The
// first entry is for step 0; the entries' steps increase.
type BatchSchedule []BatchFrom
