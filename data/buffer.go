package data

import (
	"encoding/binary"
	"fmt"
	"math"
	"runtime/debug"
)

// Buffer is a Source over packed little-endian tokens of 1, 2 or 4 bytes, in
// memory or in a mapped file.
type Buffer struct {
	name  string // in errors
	data  []byte // n·width bytes
	width int64  // bytes a token
	n     int64
	unmap func() error // nil if data is the Go heap's
}

// Len is the number of tokens.
func (b *Buffer) Len() int64 { return b.n }

// Name is the path that the tokens come from.
func (b *Buffer) Name() string { return b.name }

// Bytes is the memory that the tokens take, mapped or not.
func (b *Buffer) Bytes() int64 { return int64(len(b.data)) }

// Mapped says that the tokens are in a mapped file, whose pages the kernel
// reads when they are touched and may drop at any time.
func (b *Buffer) Mapped() bool { return b.unmap != nil }

// Tokens fills dst with tokens [start, start+len(dst)). It allocates nothing.
func (b *Buffer) Tokens(dst []int32, start int64) (err error) {
	if start < 0 || start > b.n || int64(len(dst)) > b.n-start {
		return fmt.Errorf("read tokens of %s: %d tokens from %d are outside of its %d", b.name, len(dst), start, b.n)
	}
	if b.unmap != nil {
		// A mapped file that another program cuts short faults when read; that
		// is bad input, not a reason to die without a word.
		old := debug.SetPanicOnFault(true)
		defer func() {
			debug.SetPanicOnFault(old)
			if r := recover(); r != nil {
				if _, ok := r.(interface{ Addr() uintptr }); !ok {
					panic(r)
				}
				err = fmt.Errorf("read tokens of %s: tokens %d to %d can no longer be read: the file became shorter, or its disk failed", b.name, start, start+int64(len(dst)))
			}
		}()
	}
	src := b.data[start*b.width : (start+int64(len(dst)))*b.width]
	switch b.width {
	case 1:
		for i, t := range src {
			dst[i] = int32(t)
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

// Close unmaps the tokens. No other call may be in progress or follow.
func (b *Buffer) Close() error {
	unmap := b.unmap
	b.data, b.n, b.unmap = nil, 0, nil
	if unmap != nil {
		return unmap()
	}
	return nil
}

// firstBeyond gives the index of the first token ≥ vocab among packed tokens,
// and the token; index -1 if there is none.
func firstBeyond(packed []byte, width int64, vocab uint32) (int64, uint32) {
	switch width {
	case 1:
		for i, t := range packed {
			if uint32(t) >= vocab {
				return int64(i), uint32(t)
			}
		}
	case 2:
		for i := 0; i+2 <= len(packed); i += 2 {
			if t := uint32(binary.LittleEndian.Uint16(packed[i:])); t >= vocab {
				return int64(i / 2), t
			}
		}
	default:
		for i := 0; i+4 <= len(packed); i += 4 {
			if t := binary.LittleEndian.Uint32(packed[i:]); t >= vocab {
				return int64(i / 4), t
			}
		}
	}
	return -1, 0
}
