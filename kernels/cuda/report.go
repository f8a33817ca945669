package cuda

import (
	"fmt"
	"sync/atomic"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
)

// reportSlot is struct report of common.cuh: page-locked memory into which a kernel writes
// the first invalid element that it finds.
type reportSlot struct {
	code  int32 // 0: no error
	value int32 // the invalid value
	index int64 // index of the invalid element
}

const reportsPerPage = 256

// report describes the operand that a kernel checks, for the error about its reportSlot.
type report struct {
	slot *reportSlot
	op   string
	kind graph.Kind
	what string // "targets"
	want string // "-1 to 50256"
}

func (r *report) err() error {
	if atomic.LoadInt32(&r.slot.code) == 0 {
		return nil
	}
	return fmt.Errorf("%s (%s): element %d of %s is %d, want %s", r.op, r.kind, r.slot.index, r.what, r.slot.value, r.want)
}

// slotAddress is a free slot and its device address.
type slotAddress struct {
	slot *reportSlot
	at   driver.Address
}
