package run

import (
	"github.com/spillway-ml/spillway/exec"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/plan"
)

// ofRole is the executor of a role's program, for buffers of the plan's program.
type ofRole struct {
	*exec.Executor
	role *plan.Role
}

var _ Executor = ofRole{}

func (e ofRole) Scalar(buf graph.BufID) (float64, error) { return e.Executor.Scalar(e.role.Own(buf)) }

func (e ofRole) Write(buf graph.BufID, off int64, data []byte) error {
	return e.Executor.Write(e.role.Own(buf), off, data)
}

func (e ofRole) Read(buf graph.BufID, off int64, data []byte) error {
	return e.Executor.Read(e.role.Own(buf), off, data)
}

func (e ofRole) HostF64(buf graph.BufID) ([]float64, error) {
	return e.Executor.HostF64(e.role.Own(buf))
}

func (e ofRole) HostF32(buf graph.BufID) ([]float32, error) {
	return e.Executor.HostF32(e.role.Own(buf))
}

func (e ofRole) HostI64(buf graph.BufID) ([]int64, error) { return e.Executor.HostI64(e.role.Own(buf)) }

func (e ofRole) HostI32(buf graph.BufID) ([]int32, error) { return e.Executor.HostI32(e.role.Own(buf)) }

func (e ofRole) HostBytes(buf graph.BufID) ([]byte, error) {
	return e.Executor.HostBytes(e.role.Own(buf))
}
