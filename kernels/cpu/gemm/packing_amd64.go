package gemm

import "unsafe"

// packing is what AVX2 makes units of 32 bits of.
type packing uint8

const (
	packF32  packing = iota
	packBF16         // widened to float32
	packF16
	packS8 // two bytes of consecutive k, widened to int16
	packU8
)

// transpose packs lanes of so many bytes, units of size bytes, of up to 8 stored rows;
// lanes of missing rows repeat the last.
func (u packing) transpose(dst, src unsafe.Pointer, ds, ss, rows, bytes, lanes, size int) {
	blocks := bytes / (8 * size)
	if blocks > 0 {
		u.transposeBlocks(dst, src, ds, ss, rows, blocks, lanes)
	}
	done := 8 * size * blocks
	if done == bytes {
		return
	}
	var raw [8][32]byte
	var units [8][8]float32
	for i := range rows {
		copy(raw[i][:], unsafe.Slice((*byte)(unsafe.Add(src, i*ss+done)), bytes-done))
	}
	u.transposeBlocks(unsafe.Pointer(&units), unsafe.Pointer(&raw), 32, 32, rows, 1, 8)
	for k := range ceil(bytes-done, size) {
		copy(unsafe.Slice((*float32)(unsafe.Add(dst, (8*blocks+k)*ds)), lanes), units[k][:])
	}
}

// copyEdge packs at most rowsAtOnce units of a sliver from the first bytes of stored
// rows, group of which are a unit.
func (u packing) copyEdge(width int, dst, src unsafe.Pointer, ss, rows, bytes, group int) {
	var raw [64 * rowsAtOnce]byte
	ld := 64 / group
	for i := range rows {
		copy(raw[i*ld:][:ld], unsafe.Slice((*byte)(unsafe.Add(src, i*ss)), bytes))
	}
	u.copy(width, dst, unsafe.Pointer(&raw), 0, ld, ceil(rows, group), 1)
}

// copy packs slivers of width units of k-major rows; see copy6F32AVX2.
func (u packing) copy(width int, dst, src unsafe.Pointer, step, ss, rows, slivers int) {
	if width == 6 {
		u.copy6(dst, src, step, ss, rows, slivers)
	} else {
		u.copy16(dst, src, step, ss, rows, slivers)
	}
}
