package planning

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/spillway-ml/spillway/cluster"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/relay"
	"github.com/spillway-ml/spillway/comm/mpi"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/internal/published"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/planner"
)

// capHost makes a rank's cap on host memory of --node-memory, unless
// --host-memory is less.
func (f *Flags) capHost(c *config.Config) {
	if f.nodeMemory == 0 {
		return
	}
	if share := max(1, f.nodeMemory/int64(max(f.nodeSize, 1))); c.HostMemory == 0 || c.HostMemory > share {
		c.HostMemory = share
	}
}

// hostShare is what a recommendation may take of host memory a rank on a GPU
// where nothing caps it; 0: anything, for --node-memory is a cap already.
func (f *Flags) hostShare(g gpus.GPU) int64 {
	if f.server == nil {
		return 0
	}
	return gpus.ForRanks(g.Server().Memory)
}

// ranksAServer is how many ranks share a server's memory.
func (f *Flags) ranksAServer(c *config.Config) int64 {
	return int64(max(1, min(f.nodeSize, c.Ranks)))
}

// settleProcesses tells c of the processes that its CPU ranks will run in.
func (f *Flags) settleProcesses(c *config.Config) error {
	if f.perProcess < 0 {
		return fmt.Errorf("--ranks-per-process %d: at least 1 rank is needed", f.perProcess)
	}
	if f.gpu != "" {
		if f.perProcess > 0 {
			return fmt.Errorf("--ranks-per-process %d with --gpu %.80s: it is for CPU ranks; a GPU's rank is planned with a process of its own", f.perProcess, f.gpu)
		}
		return nil
	}
	if strings.EqualFold(f.transport, cluster.InProc) {
		if f.perProcess > 0 && f.perProcess != c.Ranks {
			return fmt.Errorf("--ranks-per-process %d with --ranks %d: one process runs all ranks; give --transport shm or mpi for several", f.perProcess, c.Ranks)
		}
		return nil
	}
	each := max(f.perProcess, 1)
	if c.Ranks%each != 0 {
		return fmt.Errorf("--ranks-per-process %d with --ranks %d: processes have equal numbers of ranks", each, c.Ranks)
	}
	c.LocalRanks = each
	if !f.countInNodes {
		f.nodeSize = c.Ranks
	}
	*c = c.Within(processes{f.transport, c.Ranks / each})
	return nil
}

// processes are those of a planned job.
type processes struct {
	transport string
	count     int
}

func (p processes) Count() int { return p.count }

func (processes) Seat(int) {}

// Memory is not known: where they will run is another machine.
func (processes) Memory(ranks int) config.HostMemory { return config.HostMemory{Ranks: ranks} }

func (p processes) Outside(each int) (bytes int64, copies bool) {
	if !strings.EqualFold(p.transport, cluster.MPI) {
		return 0, false
	}
	return mpi.OutsideBytes(p.count, each) + relay.Bytes, true
}

// onServer is what the ranks of a server take of a space together.
func (f *Flags) onServer(p *planner.Forecast, s graph.Space) int64 {
	return f.ranksAServer(&p.Config) * (p.Plan.Layout.Spaces[s].Peak + p.Plan.Config.Outside[s])
}

// serverNote says what the servers have, and how that is known; "" where nothing
// is.
func (f *Flags) serverNote(asked *planner.Forecast) string {
	n := f.ranksAServer(&asked.Config)
	switch {
	case f.nodeMemory > 0:
		return fmt.Sprintf("a server's memory of %s (--node-memory) is shared by its %d ranks", plan.Bytes(f.nodeMemory), n)
	case f.server == nil:
		return ""
	}
	total := n * f.server.Memory
	text := fmt.Sprintf("a server of %d is taken to have %s (%s); --node-memory says what yours has", n, plan.Bytes(total), f.server.Source)
	if asked.Config.HostMemory == 0 && f.onServer(asked, graph.Host) > gpus.ForRanks(total) {
		text += ". What was asked for needs more than that"
	}
	return text
}

// timeRange is what published runs on the GPU say of a plan's predicted time, those of --stack
// if it is given; nil without --gpu.
func (f *Flags) timeRange(p *planner.Forecast) *published.Range {
	if f.gpuFound == nil {
		return nil
	}
	r := published.RangeOf(f.fits, published.PartsOf(p.Step.Seconds, p.Step.Exposed, p.Step.Products, p.Step.Attention))
	return &r
}

// ownStack is the --stack that calibrates nothing.
const ownStack = "spillway"

// checkStack takes the calibrations of the GPU: of --stack, or of all stacks.
func (f *Flags) checkStack() error {
	switch {
	case f.gpuFound == nil && f.stack != "":
		return fmt.Errorf("--stack %.40s is for predicted times on GPUs; give --gpu NAME too, or leave --stack out", f.stack)
	case f.gpuFound == nil:
	case f.stack == "" || f.stack == ownStack:
		f.stack = ""
		f.fits = published.FitsOf(f.gpuFound.Name, gpus.Generation)
	default:
		fit := published.FitOf(f.stack, f.gpuFound.Name, gpus.Generation)
		if fit == nil {
			return fmt.Errorf("--stack %.40q: no published run of it is known; give %s or %s",
				f.stack, strings.Join(published.Stacks, ", "), ownStack)
		}
		f.fits = []*published.Fit{fit}
	}
	return nil
}

// seconds writes a predicted time of a plan: on a GPU as the range that it is worth.
func (f *Flags) seconds(p *planner.Forecast, v float64) string {
	r := f.timeRange(p)
	if r == nil {
		return seconds(v)
	}
	return between(roughSeconds(r.Low*v), roughSeconds(r.High*v))
}

// step writes a plan's predicted time of a step.
func (f *Flags) step(p *planner.Forecast) string { return f.seconds(p, p.Step.Seconds) }

// speed writes a plan's predicted tokens a second in the same way.
func (f *Flags) speed(p *planner.Forecast) string {
	v, r := p.TokensPerSecond(), f.timeRange(p)
	if r == nil {
		return cli.Count(v) + " tokens/s"
	}
	low, high := rough(v/r.High), rough(v/r.Low)
	if high < 1e6 {
		return between(grouped(int64(low)), grouped(int64(high))) + " tokens/s"
	}
	return between(millions(low), millions(high)) + " M tokens/s"
}

// millions is a number in millions, which stays short: a table has four.
func millions(v float64) string { return strconv.FormatFloat(rough(v/1e6), 'f', -1, 64) }

// between joins the ends of a range, of one unit once.
func between(low, high string) string {
	a, unit, ok := strings.Cut(low, " ")
	b, other, _ := strings.Cut(high, " ")
	switch {
	case low == high:
		return low
	case ok && unit == other:
		return a + "–" + b + " " + unit
	}
	return low + "–" + high
}

// rough rounds to two digits.
func rough(v float64) float64 {
	if v <= 0 {
		return 0
	}
	digits, _ := strconv.ParseFloat(strconv.FormatFloat(v, 'e', 1, 64), 64)
	return digits
}

// roughSeconds is seconds with two digits.
func roughSeconds(v float64) string {
	v = rough(v)
	switch {
	case v >= 120:
		return fmt.Sprintf("%.0f min", rough(v/60))
	case v >= 10:
		return fmt.Sprintf("%.0f s", v)
	case v >= 1:
		return fmt.Sprintf("%.1f s", v)
	case v >= 0.01:
		return fmt.Sprintf("%.0f ms", v*1e3)
	case v >= 0.001:
		return fmt.Sprintf("%.1f ms", v*1e3)
	}
	return fmt.Sprintf("%.0f µs", v*1e6)
}

// elsewhere says what the same job is known to need in other software, which is
// not what fits here; "" where nothing is known of a GPU.
func (f *Flags) elsewhere(asked *planner.Forecast) string {
	if f.gpuFound == nil {
		return ""
	}
	here := "does not fit here"
	if asked.Fits {
		here = "fits here"
	}
	device := asked.Plan.Layout.Spaces[graph.Device].Peak + asked.Plan.Config.Outside[graph.Device]
	fsdp := published.DeviceMemory(published.Torch, published.Compiled)
	text := fmt.Sprintf("The job %s, with Spillway's plan. PyTorch FSDP took %s; by that the job needs %s of a GPU there", here, fsdp.Text(), scaled(fsdp, device))
	switch capacity := asked.Plan.Config.Capacity[graph.Device]; {
	case float64(device)*fsdp.Low > float64(capacity):
		text += " and does not fit"
	case float64(device)*fsdp.High > float64(capacity):
		text += " and may not fit"
	}
	if asked.Plan.Layout.Spaces[graph.Host].Peak > 1<<30 {
		ds := published.HostMemory(published.DeepSpeed)
		text += fmt.Sprintf("; DeepSpeed's offload took %s of a server's memory, here %s", ds.Text(), scaled(ds, f.onServer(asked, graph.Host)))
	}
	return text + "."
}

// scaled writes the bytes that a factor makes of a plan's.
func scaled(m published.Memory, bytes int64) string {
	low, high := plan.Bytes(int64(m.Low*float64(bytes))), plan.Bytes(int64(m.High*float64(bytes)))
	return between(low, high)
}

// precisionNotes say what the precision of the request means on the GPU.
func (f *Flags) precisionNotes(c *config.Config) (lines []string) {
	g := f.gpuFound
	if g == nil {
		return nil
	}
	precision := strings.ToLower(c.Precision)
	switch {
	case precision == "bf16" && g.Rates.BF16 == 0:
		lines = append(lines, fmt.Sprintf("%s has no units for bf16: its products are planned at the rate of fp32, %.3g TFLOP/s; in fp16 it has %.3g", g.Name, g.Rates.FP32/1e12, g.Rates.FP16/1e12))
	case !f.precisionGiven && g.Rates.BF16 == 0:
		lines = append(lines, fmt.Sprintf("%s has no units for bf16; in fp16 its products have %.3g TFLOP/s instead of %.3g: --precision fp16", g.Name, g.Rates.FP16/1e12, g.Rates.FP32/1e12))
	}
	if len(c.Int8) > 0 {
		lines = append(lines, "--int8 is planned only: train refuses it with --device cuda, whose kernels have none")
	}
	if strings.EqualFold(c.OptimizerDType, "bf16") {
		lines = append(lines, "--optimizer-dtype bf16 is planned only: train refuses it with --device cuda, whose kernels have none")
	}
	return lines
}

// longest is the length of rows that models are usually trained with, where
// theirs is longer.
const longest = 8192

// positions returns the rows' length that a model is usually trained with.
func positions(p *planner.Forecast) int { return min(p.Shape().Positions, longest) }
