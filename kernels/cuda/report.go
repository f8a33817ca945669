package cuda

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
)

// reportSlot is struct report of common.cuh: page-locked memory into which a kernel writes
// the first invalid element that it finds.
type reportSlot struct {
	code  int32 // 0: nothing wrong
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

// report reserves a slot in which the kernel reports an invalid element of operand what,
// and returns the slot's device address.
func (b *binding) report(what, want string) driver.Address {
	if b.err != nil {
		return 0
	}
	s, err := b.lib.slot()
	if err != nil {
		b.failf("memory for what the kernel finds wrong: %w", err)
		return 0
	}
	b.kernel.report = &report{slot: s.slot, op: b.Op.Name, kind: b.Op.Kind, what: what, want: want}
	return s.at
}

func (l *Library) slot() (slotAddress, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.free) == 0 {
		p, at, err := l.o.API.HostAlloc(int64(unsafe.Sizeof(reportSlot{})) * reportsPerPage)
		if err != nil {
			return slotAddress{}, err
		}
		page := (*[reportsPerPage]reportSlot)(p)
		*page = [reportsPerPage]reportSlot{}
		l.reports = append(l.reports, page)
		for i := range page {
			l.free = append(l.free, slotAddress{&page[i], at + driver.Address(uintptr(i)*unsafe.Sizeof(page[i]))})
		}
	}
	s := l.free[len(l.free)-1]
	l.free = l.free[:len(l.free)-1]
	return s, nil
}
