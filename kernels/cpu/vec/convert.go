package vec

import (
	"unsafe"

	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// Half is a 16-bit floating-point format.
type Half uint8

// Formats. NoHalf marks an absent 16-bit copy.
const (
	NoHalf Half = iota
	BF16        // bfloat16
	F16         // IEEE binary16
)

// Narrow rounds float32 to 16 bits, to nearest even; NaN stay NaN.
type Narrow struct {
	To  Half
	Src []float32
	Dst []uint16
}

// Run converts.
func (k *Narrow) Run(p *pool.Pool) error {
	c := check{op: "narrow"}
	c.half("To", k.To)
	c.size1("Dst", "that of Src", len(k.Dst), len(k.Src))
	return c.run(p, tasks(len(k.Src), grain), k)
}

// half refuses what is not a 16-bit format.
func (c *check) half(name string, h Half) {
	if h != BF16 && h != F16 {
		c.fail("%s is %d, want BF16 (%d) or F16 (%d)", name, h, BF16, F16)
	}
}

// RunIndex is a pool.Task's; call Run.
func (k *Narrow) RunIndex(i int) {
	lo, hi := piece(i, grain, len(k.Src))
	narrow(k.To, k.Dst[lo:hi], k.Src[lo:hi])
}

// Widen converts 16 bits to float32, exactly.
type Widen struct {
	From Half
	Src  []uint16
	Dst  []float32
}

// Run converts.
func (k *Widen) Run(p *pool.Pool) error {
	c := check{op: "widen"}
	c.half("From", k.From)
	c.size1("Dst", "that of Src", len(k.Dst), len(k.Src))
	return c.run(p, tasks(len(k.Src), grain), k)
}

// RunIndex is a pool.Task's; call Run.
func (k *Widen) RunIndex(i int) {
	lo, hi := piece(i, grain, len(k.Src))
	widen(k.From, k.Dst[lo:hi], k.Src[lo:hi])
}

// WidenRow and NarrowRow convert elements on the caller's goroutine; both sides
// have the same length.
func WidenRow(from Half, dst []float32, src []uint16) { widen(from, dst, src) }

// NarrowRow rounds as Narrow does; see WidenRow.
func NarrowRow(to Half, dst []uint16, src []float32) { narrow(to, dst, src) }

func narrow(h Half, dst []uint16, src []float32) {
	if m := len(src) &^ 31; fast[float32](m) {
		simd.narrow[h-BF16](unsafe.SliceData(dst), ptr(src), m)
		dst, src = dst[m:], src[m:]
	}
	switch h {
	case BF16:
		for i, v := range src {
			dst[i] = num.BF16(v)
		}
	case F16:
		for i, v := range src {
			dst[i] = num.F16(v)
		}
	}
}

func widen(h Half, dst []float32, src []uint16) {
	if m := groups[float32](len(src)); m > 0 {
		simd.widen[h-BF16](ptr(dst), unsafe.SliceData(src), m)
		dst, src = dst[m:], src[m:]
	}
	switch h {
	case BF16:
		for i, v := range src {
			dst[i] = num.FromBF16(v)
		}
	case F16:
		for i, v := range src {
			dst[i] = num.FromF16(v)
		}
	}
}
