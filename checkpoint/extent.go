package checkpoint

import (
	"encoding/binary"
	"fmt"
	"strconv"
	"strings"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/safetensors"
)

// An extent is a run of elements of one state of one logical tensor. In a rank's file it is a
// tensor named STATE:TENSOR:START.

const (
	// ExtentBytes bounds an extent. It is also the least that is read to check one element.
	ExtentBytes = 1 << 20
	// ScaleSuffix is appended to the name of an 8-bit state to name its scales.
	ScaleSuffix = ".scale"
	scaledDType = safetensors.DType("U8")
	// sumsKey is the metadata of a rank's file that holds its extents' checksums.
	sumsKey = "crc32c"
)

// QuantBlock is the number of elements of an 8-bit state that share a scale, counted from the
// tensor's first element.
const QuantBlock = graph.QuantBlock

// Extent is a stored range of elements of one tensor's state. For scales, Start and N count
// blocks of QuantBlock elements.
type Extent struct {
	State, Tensor string
	Start, N      int64 // elements
	DType         safetensors.DType
}

// Bytes returns the extent's size in the file.
func (e Extent) Bytes() int64 { return e.N * e.DType.Size() }

func (e Extent) tensor() safetensors.Tensor {
	return safetensors.Tensor{Name: e.State + ":" + e.Tensor + ":" + strconv.FormatInt(e.Start, 10), DType: e.DType, Shape: []int64{e.N}}
}

func extentOf(t safetensors.Tensor) (Extent, error) {
	state, rest, ok := strings.Cut(t.Name, ":")
	last := strings.LastIndexByte(rest, ':')
	if !ok || last < 0 || len(t.Shape) != 1 {
		return Extent{}, fmt.Errorf("%.80q is not a valid extent name (STATE:TENSOR:START)", t.Name)
	}
	start, err := strconv.ParseInt(rest[last+1:], 10, 64)
	e := Extent{State: state, Tensor: rest[:last], Start: start, N: t.Shape[0], DType: t.DType}
	switch {
	case err != nil || start < 0 || e.Start > e.Start+e.N || e.tensor().Name != t.Name:
		return e, fmt.Errorf("%.80q is not a valid extent name (STATE:TENSOR:START)", t.Name)
	case e.DType != scaledDType && e.DType != safetensors.F32 && e.DType != safetensors.BF16 && e.DType != safetensors.F16:
		return e, fmt.Errorf("extent %.80q is of %s", t.Name, e.DType)
	case e.N == 0 || e.Bytes() > ExtentBytes:
		return e, fmt.Errorf("extent %.80q has %d bytes; 1 to %d are taken", t.Name, e.Bytes(), int64(ExtentBytes))
	case e.DType == scaledDType && e.Start%QuantBlock != 0:
		return e, fmt.Errorf("extent %.80q begins inside of a block of %d elements", t.Name, int64(QuantBlock))
	}
	return e, nil
}

// littleEndian says that this machine's memory has the files' byte order.
var littleEndian = binary.NativeEndian.Uint16([]byte{1, 0}) == 1
