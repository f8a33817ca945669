package store

import (
	"fmt"
	"hash/crc32"

	"github.com/klauspost/compress/s2"
	"github.com/klauspost/compress/zstd"
)

// Codec is a compression of blocks. Each block keeps its position and full size in the file, so
// a codec saves bandwidth but no space. A block that would not become at least a page shorter is
// stored uncompressed.
type Codec uint8

// Codecs.
const (
	None Codec = iota
	S2
	Zstd // at its fastest level
	numCodecs
)

func (c Codec) String() string {
	if c < numCodecs {
		return [...]string{"none", "s2", "zstd"}[c]
	}
	return fmt.Sprintf("codec(%d)", uint8(c))
}

// buffers returns how many block-sized buffers a worker needs.
func (c Codec) buffers() int {
	if c == None {
		return 1
	}
	return 2
}

func (c Codec) open() (coder, error) {
	switch c {
	case S2:
		return coder{kind: S2}, nil
	case Zstd:
		w, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1), zstd.WithEncoderCRC(false))
		if err != nil {
			return coder{}, err
		}
		r, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(maxBlock))
		return coder{kind: Zstd, w: w, r: r}, err
	}
	return coder{}, nil
}

// coder is the encoder and decoder of one worker.
type coder struct {
	kind    Codec
	w       *zstd.Encoder
	r       *zstd.Decoder
	scratch []byte // for S2 encodings that may not fit dst
}

func (c *coder) close() {
	if c.r != nil {
		c.r.Close()
	}
}

// encode encodes src into dst and returns the length, or 0 if that is not below limit.
func (c *coder) encode(dst, src []byte, limit int) int {
	var out []byte
	if c.kind == S2 {
		if need := s2.MaxEncodedLen(len(src)); len(c.scratch) < need {
			c.scratch = make([]byte, need)
		}
		out = s2.Encode(c.scratch, src)
	} else {
		out = c.w.EncodeAll(src, c.scratch[:0])
		c.scratch = out[:cap(out)]
	}
	if len(out) >= limit {
		return 0
	}
	return copy(dst, out)
}

// decode fills dst from src.
func (c *coder) decode(dst, src []byte) error {
	var out []byte
	var err error
	if c.kind == S2 {
		out, err = s2.Decode(dst, src)
	} else {
		out, err = c.r.DecodeAll(src, dst[:0])
	}
	if err == nil && (len(out) != len(dst) || &out[0] != &dst[0]) {
		err = fmt.Errorf("%d bytes, want %d", len(out), len(dst))
	}
	if err != nil {
		return fmt.Errorf("decode %s: %w", c.kind, err)
	}
	return nil
}

// savePacked writes block g, whose contents are buf.
func (f *File) savePacked(w *worker, buf []byte, g int64) error {
	out := buf
	n := w.coder.encode(w.packed, buf, len(buf)-Page+1)
	if n > 0 {
		out = w.packed[:roundUp(int64(n), Page)]
		clear(out[n:])
	} else {
		n = len(buf)
	}
	f.sums[g], f.lengths[g] = crc32.Checksum(out[:n], castagnoli), uint32(n)
	return f.writeRaw(out, g*f.granule)
}

// loadPacked reads block g into buf and verifies it.
func (f *File) loadPacked(w *worker, buf []byte, g int64) error {
	n, off := int64(f.lengths[g]), g*f.granule
	in := buf
	if n < int64(len(buf)) {
		in = w.packed[:roundUp(n, Page)]
	}
	if err := f.readRaw(in, off); err != nil {
		return err
	}
	if got := crc32.Checksum(in[:n], castagnoli); got != f.sums[g] {
		return &Error{Op: "read", File: f.name, Off: off, Len: n, Err: &Corrupt{Want: f.sums[g], Got: got}}
	}
	if n == int64(len(buf)) {
		return nil
	}
	if err := w.coder.decode(buf, in[:n]); err != nil {
		return &Error{Op: "read", File: f.name, Off: off, Len: n, Err: err}
	}
	return nil
}
