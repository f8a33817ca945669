package cuda

import (
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
)

// attentionHeads holds the addresses of queries, keys and values. They are side by side in the rows
// of one operand (packed), or in three separate operands.
type attentionHeads struct {
	q, k, v   driver.Address
	ldq, ldkv int64 // row strides of queries, and of keys and values, in elements
	operands  int   // number of operands: 1 if packed, else 3
}

func (b *binding) attentionHeads(get func(int) driver.Address) attentionHeads {
	a := attr[graph.AttentionAttr](b)
	wq, wkv := a.Heads*a.HeadDim, a.KVHeads*a.HeadDim
	if !a.Packed {
		return attentionHeads{get(0), get(1), get(2), wq, wkv, 3}
	}
	at, size := get(0), b.inBuf(0).DType.Size()
	return attentionHeads{at, at + driver.Address(wq*size), at + driver.Address((wq+wkv)*size), wq + 2*wkv, wq + 2*wkv, 1}
}
