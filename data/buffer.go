package data

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"unsafe"
)

// Buffer is a Source over packed little-endian tokens of 1, 2 or 4 bytes, in
// memory or in a file.
//
// A file is read at each call, not mapped. Pages of a mapping count as this process's memory
// once random windows have touched them, until that is the whole corpus, which would break the
// plan's memory limit. A mapped file that becomes shorter would also fault. Reading 256 tokens
// from the page cache takes about a microsecond.
type Buffer struct {
	name   string   // in errors
	data   []byte   // n·width bytes, or nil: in file
	file   *os.File // of n·width bytes from offset on
	offset int64
	width  int64 // bytes a token
	n      int64
	after  func() // runs after file is closed; may be nil

	leftOut string // of a folder, counts of files left out, by kind; "" for none
}

// LeftOut describes in one line the files of a folder that were not read because they are not text;
// "" if there are none.
func (b *Buffer) LeftOut() string { return b.leftOut }

// Len returns the number of tokens.
func (b *Buffer) Len() int64 { return b.n }

// Name returns the path that the tokens come from.
func (b *Buffer) Name() string { return b.name }

// TokenBytes returns the size of a token in memory or in the file, in bytes.
func (b *Buffer) TokenBytes() int64 { return b.width }

// Tokens fills dst with tokens [start, start+len(dst)). It allocates nothing.
func (b *Buffer) Tokens(dst []int32, start int64) error {
	if start < 0 || start > b.n || int64(len(dst)) > b.n-start {
		return fmt.Errorf("read tokens of %s: %d tokens from %d are outside of its %d", b.name, len(dst), start, b.n)
	}
	if len(dst) == 0 {
		return nil
	}
	var src []byte
	if b.file == nil {
		src = b.data[start*b.width:]
	} else {
		// The bytes are read into the end of dst's memory, and widened in place from the front.
		// Token i overwrites only bytes that were converted before, since (4-width)·(i+1) ≤
		// (4-width)·n.
		mem := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(dst))), 4*len(dst))
		src = mem[(4-b.width)*int64(len(dst)):]
		if _, err := b.file.ReadAt(src, b.offset+start*b.width); err != nil {
			if errors.Is(err, io.EOF) {
				err = errors.New("the file became shorter since it was opened")
			}
			return fmt.Errorf("read tokens of %s: %w", b.name, err)
		}
	}
	switch b.width {
	case 1:
		for i := range dst {
			dst[i] = int32(src[i])
		}
	case 2:
		for i := range dst {
			dst[i] = int32(binary.LittleEndian.Uint16(src[2*i:]))
		}
	default:
		for i := range dst {
			t := binary.LittleEndian.Uint32(src[4*i:])
			if t > math.MaxInt32 {
				return fmt.Errorf("read tokens of %s: token %d is %d; a token is under 2^31", b.name, start+int64(i), t)
			}
			dst[i] = int32(t)
		}
	}
	return nil
}

// Has says whether a token occurs. It reads at most scanBytes of the tokens and stops at the
// first match. If there are more tokens than that and no match, it returns true.
func (b *Buffer) Has(token int32) (bool, error) {
	part := make([]int32, 1<<16)
	end := min(b.n, scanBytes/b.width)
	for at := int64(0); at < end; at += int64(len(part)) {
		part = part[:min(int64(len(part)), end-at)]
		if err := b.Tokens(part, at); err != nil {
			return false, err
		}
		if slices.Contains(part, token) {
			return true, nil
		}
	}
	return end < b.n, nil
}

// Close closes the file. No other call may be in progress or follow.
func (b *Buffer) Close() error {
	f := b.file
	b.data, b.file, b.n = nil, nil, 0
	if f == nil {
		return nil
	}
	err := f.Close()
	if b.after != nil {
		b.after()
	}
	return err
}

// firstBeyond returns the index and value of the first token ≥ vocab among packed tokens; the
// index is -1 if there is none.
func firstBeyond(packed []byte, width int64, vocab uint32) (int64, uint32) {
	if width == 2 {
		for i := 0; i+2 <= len(packed); i += 2 {
			if t := uint32(binary.LittleEndian.Uint16(packed[i:])); t >= vocab {
				return int64(i / 2), t
			}
		}
		return -1, 0
	}
	for i := 0; i+4 <= len(packed); i += 4 {
		if t := binary.LittleEndian.Uint32(packed[i:]); t >= vocab {
			return int64(i / 4), t
		}
	}
	return -1, 0
}

// scanBytes is the part of a token file that is checked against the vocabulary when the file is
// opened; Sampler checks the rest while it reads. Reading a GiB takes under a second.
const scanBytes = 1 << 30
