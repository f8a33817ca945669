package planning

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/pflag"

	"github.com/spillway-ml/spillway/cluster"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/options"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/relay"
	"github.com/spillway-ml/spillway/comm/mpi"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/internal/published"
	"github.com/spillway-ml/spillway/offload/store"
	"github.com/spillway-ml/spillway/planner"
)

// refuseMachine rejects flags that measure, read or write if there is no machine, as in a browser.
func (f *Flags) refuseMachine(fs *pflag.FlagSet) error {
	if f.here != nil {
		return nil
	}
	if strings.EqualFold(f.gpu, "detect") {
		return errors.New("--gpu detect: a browser does not tell which GPU it has; give --gpu NAME (plan --list-gpus)")
	}
	if f.calibrate {
		return errors.New("--calibrate: a browser cannot measure its machine; give --gpu NAME, or --threads N for a " +
			"CPU of typical cores")
	}
	for _, name := range []string{"config", "from", "html", "json", "dump"} {
		if file := fs.Lookup(name).Value.String(); file != "" && file != "-" {
			return fmt.Errorf("--%s %.80q: a browser has no files; leave it out, or use spillway plan on a computer",
				name, file)
		}
	}
	return nil
}

// Settle derives ranks, caps and the memory outside the arenas from the flags about hardware.
func (f *Flags) Settle(fs *pflag.FlagSet, c *config.Config) error {
	options.FollowPipeline(fs, c)
	for _, n := range []struct {
		flag string
		v    int
	}{{"nodes", f.nodes}, {"gpus-per-node", f.gpusPerNode}} {
		if n.v < 1 {
			return fmt.Errorf("--%s %d: at least 1 is needed", n.flag, n.v)
		}
	}
	if fs.Changed("effort") && f.effort < 1 {
		return fmt.Errorf("--effort %d: at least 1 plan is needed", f.effort)
	}
	if !f.eachAlone {
		f.plans = planner.NewBudget(f.effort)
	}
	if err := f.checkBudget(); err != nil {
		return err
	}
	f.countInNodes = fs.Changed("nodes") || fs.Changed("gpus-per-node")
	if f.countInNodes {
		if f.nodes > 1<<20/f.gpusPerNode {
			return fmt.Errorf("--nodes %d --gpus-per-node %d: more than %d ranks are not planned", f.nodes,
				f.gpusPerNode, 1<<20)
		}
		ranks := f.nodes * f.gpusPerNode
		if fs.Changed("ranks") && c.Ranks != ranks {
			return fmt.Errorf("--ranks %d contradicts --nodes %d times --gpus-per-node %d, which is %d; leave "+
				"--ranks out", c.Ranks, f.nodes, f.gpusPerNode, ranks)
		}
		c.Ranks = ranks
	}
	f.nodeSize = min(c.Ranks, gpus.NodeGPUs)
	if f.countInNodes {
		f.nodeSize = f.gpusPerNode
	}
	f.precisionGiven, f.seqGiven, f.accumGiven = fs.Changed("precision"), fs.Changed("seq"), fs.Changed("accum")
	if f.gpu == "" && !f.countInNodes {
		f.nodeSize = c.Ranks // the CPU's ranks are on one machine
	}
	f.hostMemory = c.HostMemory
	f.capHost(c)
	if err := f.settleProcesses(c); err != nil {
		return err
	}
	if f.gpu == "" {
		switch {
		case fs.Changed("gpu"):
			return errors.New(`--gpu "": the name of a GPU is missing; --list-gpus lists them, ` +
				`and detect is this machine's own`)
		case strings.EqualFold(c.Device, "cuda"):
			return errors.New("--device cuda: say which GPU to plan for: --gpu NAME (--list-gpus lists them) or " +
				"--gpu detect")
		}
		return f.checkStack()
	}
	if fs.Changed("device") && strings.EqualFold(c.Device, "cpu") && !f.read {
		return fmt.Errorf("--device %s with --gpu %.40s: a plan is for one of them; leave the other out", c.Device, f.gpu)
	}
	var g gpus.GPU
	var err error
	if strings.EqualFold(f.gpu, "detect") {
		if f.machine.GPU == nil {
			if f.machine.GPU, err = f.here.GPU(); err != nil {
				return fmt.Errorf("--gpu detect: %w", err)
			}
			f.readMeasurements(c.Disk)
		}
		g = *f.machine.GPU
	} else if g, err = gpus.Lookup(f.gpu); err != nil {
		return fmt.Errorf("--gpu: %w (all: spillway plan --list-gpus)", err)
	}
	f.gpuFound = &g
	if server := g.Server(); f.nodeMemory == 0 {
		f.server = &server
	}
	if free := g.Memory - g.Used; c.DeviceMemory == 0 || c.DeviceMemory > free {
		c.DeviceMemory = free
	}
	c.Outside[graph.Device], c.Outside[graph.Host] = g.OutsideBytes(), gpus.HostOutsideBytes
	c.LocalRanks = f.nodeSize
	c.Target = graph.CUDATarget()
	return f.checkStack()
}

// checkStack sets the calibrations for the GPU: of --stack, or of all stacks.
func (f *Flags) checkStack() error {
	switch {
	case f.gpuFound == nil && f.stack != "":
		return fmt.Errorf("--stack %.40s is for predicted times on GPUs; give --gpu NAME too, or leave --stack out",
			f.stack)
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

// settleProcesses adds to c the processes that its CPU ranks will run in.
func (f *Flags) settleProcesses(c *config.Config) error {
	if f.perProcess < 0 {
		return fmt.Errorf("--ranks-per-process %d: at least 1 rank is needed", f.perProcess)
	}
	if f.gpu != "" {
		if f.perProcess > 0 {
			return fmt.Errorf("--ranks-per-process %d with --gpu %.80s: it is for CPU ranks; a GPU's rank is planned "+
				"with a process of its own", f.perProcess, f.gpu)
		}
		return nil
	}
	if strings.EqualFold(f.transport, cluster.InProc) {
		if f.perProcess > 0 && f.perProcess != c.Ranks {
			return fmt.Errorf("--ranks-per-process %d with --ranks %d: one process runs all ranks; give --transport "+
				"shm or mpi for several", f.perProcess, c.Ranks)
		}
		return nil
	}
	each := max(f.perProcess, 1)
	if c.Ranks%each != 0 {
		return fmt.Errorf("--ranks-per-process %d with --ranks %d: processes have equal numbers of ranks", each,
			c.Ranks)
	}
	c.LocalRanks = each
	if !f.countInNodes {
		f.nodeSize = c.Ranks
	}
	*c = c.Within(processes{f.transport, c.Ranks / each})
	return nil
}

// processes describes the processes of a planned job.
type processes struct {
	transport string
	count     int
}

func (p processes) Count() int { return p.count }

func (processes) Seat(int) {}

// Memory returns no size: the job will run on another machine.
func (processes) Memory(ranks int) config.HostMemory { return config.HostMemory{Ranks: ranks} }

func (p processes) Outside(each int) (bytes int64, copies bool) {
	if !strings.EqualFold(p.transport, cluster.MPI) {
		return 0, false
	}
	return mpi.OutsideBytes(p.count, each) + relay.Bytes, true
}

// readMeasurements reads doctor's measurements of this machine, for a plan of its GPUs.
func (f *Flags) readMeasurements(disk string) {
	f.machine.Host = f.here.MemoryBandwidth()
	if disk == "" {
		return
	}
	if t, err := store.LoadTuning(disk); err == nil {
		f.machine.Disk = &DiskSpeed{Read: t.ReadBytesPerSec, Write: t.WriteBytesPerSec}
	}
}
