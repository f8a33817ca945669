package gpu

import (
	"fmt"
	"time"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/nccl"
	"github.com/spillway-ml/spillway/device/cuda"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/platform"
)

// ncclPart is the state for a job over processes: a GPU for each rank of this process, NCCL between
// all ranks, and the processes' host transport.
type ncclPart struct {
	api    nccl.API
	joined platform.Joined // nil: not started
	world  *nccl.World
	beside nccl.Control
	need   int64 // bytes of the rank's arena
}

// seen returns the GPUs for a process's ranks in a job over processes. If the launcher shows it
// exactly as many GPUs as it has ranks, it uses these. Otherwise it uses those at its place among
// its host's processes.
func seen(local, ranks int, list []driver.Device) ([]driver.Device, error) {
	if len(list) == ranks {
		return list, nil
	}
	if (local+1)*ranks <= len(list) {
		return list[local*ranks : (local+1)*ranks], nil
	}
	each := ""
	if ranks > 1 {
		each = fmt.Sprintf(" with %d ranks, a GPU each,", ranks)
	}
	return nil, fmt.Errorf("this process%s is number %d of its host, counted from 0, and sees %d GPUs (CUDA_VISIBLE_DEVICES names them, where it is set): "+
		"start no more ranks on a host than it has GPUs", each, local, len(list))
}

// openNCCL opens the library for a job over processes.
func (c *cudaPlatform) openNCCL() error {
	if _, alone := c.o.Transport.(OverNCCL); alone && len(c.o.World.Local) > 1 {
		return fmt.Errorf("Config.LocalRanks %d: processes that have NCCL alone to meet by are for a rank each; start a process for each rank, or start them with mpirun or spillway launch",
			len(c.o.World.Local))
	}
	api, err := c.parts.NCCL()
	if err != nil {
		return &platform.MissingDevice{Device: c.o.Device, Err: err}
	}
	c.nccl = &ncclPart{api: api}
	return nil
}

// outsideOfNCCL estimates the GPU memory outside its arena, in bytes, that a rank needs to
// communicate with other processes: scratch, and NCCL's own memory. Start measures the latter.
func (c *cudaPlatform) outsideOfNCCL() int64 {
	if c.nccl == nil {
		return 0
	}
	return nccl.ScratchBytes(c.o.World.Size) + nccl.LibraryBytes(c.o.World.Size)
}

// start joins the job's processes and creates this process's part of NCCL's world.
func (n *ncclPart) start(o *platform.Options, s *platform.Setup, sum func(int, graph.DType, graph.SumOrder) (nccl.Sum, error)) (err error) {
	n.need = s.Plan.Layout.Spaces[graph.Device].Peak
	mesh := s.Plan.Program.Mesh
	joined, err := o.Transport.Join(mesh, o.World.Local, o.Timeout, o.Warn)
	if err != nil {
		return err // joined may be a non-nil interface that holds nil
	}
	n.joined = joined
	if s.Failed != nil {
		n.joined.OnError(s.Failed)
	}
	with := nccl.Options{API: n.api, Sum: sum, Timeout: o.Timeout, Failed: o.Warn}
	if alone, ok := joined.(*nccl.HostWorld); ok { // the processes have no other transport
		n.beside = alone
		if o.World.Size > 1 { // a single remaining rank has nothing to send
			with.World, err = alone.Communicator()
		}
		if err != nil {
			return err
		}
	} else if n.beside, err = newControl(n.joined, o.World.Local); err != nil {
		return err
	}
	with.Control = n.beside
	n.world, err = nccl.New(mesh, with)
	return err
}

var _ platform.Meeter = (*cudaPlatform)(nil)

// Meets reports whether Rank waits for other processes: it does if NCCL connects them.
func (c *cudaPlatform) Meets() bool { return c.nccl != nil }

// Abort ends the job of several processes.
func (c *cudaPlatform) Abort(err error) { c.nccl.beside.Abort(err) }

// groups creates a rank's groups. It is an error if NCCL left too little memory for the plan.
func (n *ncclPart) groups(ctx *cuda.Context) (map[int]comm.Group, error) {
	groups, err := n.world.Groups(ctx)
	if err != nil {
		return nil, err
	}
	free, _, err := ctx.Driver().MemInfo()
	if err == nil && free < n.need {
		err = fmt.Errorf("rank %d: NCCL has taken %s of the GPU, and %s are left for the plan's %s; plan for less: a smaller Config.DeviceMemory",
			ctx.Rank(), plan.Bytes(n.world.Took(ctx.Rank())), plan.Bytes(free), plan.Bytes(n.need))
		groups[-1].Abort(err)
	}
	return groups, err
}

func (n *ncclPart) close() error {
	if n == nil || n.joined == nil {
		return nil
	}
	return n.joined.Close()
}

// about describes the NCCL library in a few words.
func (n *ncclPart) about() string {
	if n == nil {
		return ""
	}
	v, err := n.api.Version()
	if err != nil {
		return ""
	}
	return "; NCCL " + nccl.VersionText(v) + " between processes"
}

// StartNCCL makes this process a rank of world processes with one GPU each, which meet only
// through NCCL at the address in NCCL_COMM_ID. local is its number among its host's processes.
// shrinks, the same in all processes, allows the remaining ranks of a job to continue: see
// nccl.Host. parts replaces the machine's libraries; nil uses those.
func StartNCCL(rank, world, local int, shrinks bool, parts *Parts) (*nccl.Host, error) {
	if parts == nil {
		parts = &realCUDA
	}
	gpu, list, err := parts.devices("cuda")
	if err != nil {
		return nil, err
	}
	if list, err = seen(local, 1, list); err != nil {
		return nil, fmt.Errorf("Config.Device cuda: %w", err)
	}
	api, err := parts.NCCL()
	if err != nil {
		return nil, &platform.MissingDevice{Device: "cuda", Err: err}
	}
	return nccl.StartHost(api, gpu, list[0], rank, world, shrinks)
}

// OverNCCL is the transport of processes started by StartNCCL.
type OverNCCL struct{ Host *nccl.Host }

// Join makes this process's rank a rank of the mesh.
func (o OverNCCL) Join(mesh []graph.Axis, _ []int, timeout time.Duration, warn func(string)) (platform.Joined, error) {
	w, err := o.Host.Join(mesh, timeout, warn)
	if err != nil {
		return nil, err
	}
	return w, nil
}
