package data

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spillway-ml/spillway/internal/regular"
)

// llm.c's token files (dev/data/data_common.py): a header of 256
// little-endian int32, then the tokens.
const (
	headerBytes  = 256 * 4
	magicUint16  = 20240520 // GPT-2: version 1, uint16 tokens
	magicUint32  = 20240801 // Llama 3: version 7, uint32 tokens
	versionGPT2  = 1
	versionLlama = 7
)

// layout describes a token file's tokens, from its length and header.
type layout struct {
	offset int64 // byte of the first token
	width  int64 // bytes a token
	n      int64 // tokens
}

// parseLayout returns the layout of a token file of size bytes. head is the start of the file,
// up to headerBytes of it.
func parseLayout(head []byte, size int64) (layout, error) {
	l := layout{width: 2}
	var magic uint32
	if len(head) >= 4 {
		magic = binary.LittleEndian.Uint32(head)
	}
	switch magic {
	case magicUint16, magicUint32:
		version := uint32(versionGPT2)
		if magic == magicUint32 {
			version, l.width = versionLlama, 4
		}
		if size < headerBytes || len(head) < headerBytes {
			return l, fmt.Errorf("it starts with llm.c's magic %d but has %d bytes; the header alone takes %d", magic, size, headerBytes)
		}
		if v := binary.LittleEndian.Uint32(head[4:]); v != version {
			return l, fmt.Errorf("the header's version at offset 4 is %d; with magic %d it must be %d (%d-byte tokens)", v, magic, version, l.width)
		}
		l.offset = headerBytes
		l.n = int64(int32(binary.LittleEndian.Uint32(head[8:])))
		if want := headerBytes + l.n*l.width; l.n < 0 || size != want {
			return l, fmt.Errorf("the header at offset 8 counts %d tokens, which would be a file of %d bytes; it has %d (room for %d tokens)", l.n, want, size, (size-headerBytes)/l.width)
		}
	default:
		if size%2 != 0 {
			return l, fmt.Errorf("it has %d bytes: the byte at offset %d is half a token; a raw token file is uint16 tokens, 2 bytes each", size, size-1)
		}
		l.n = size / 2
	}
	if l.n < 2 {
		return l, fmt.Errorf("it has %d tokens; training needs 2 at least, an input and its target", l.n)
	}
	return l, nil
}

// OpenTokenFile opens a token file: raw little-endian uint16, or with llm.c's header (magic
// 20240520: uint16; 20240801: uint32). With vocab > 0, the tokens of the first GiB are checked
// to be below it. Errors name the file, the offset and the expected value.
func OpenTokenFile(path string, vocab int) (*Buffer, error) {
	// Stat before opening: opening a pipe would wait for its writer.
	st, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("open token file: %w", err)
	}
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("open token file: %s is not a regular file", path)
	}
	f, err := regular.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open token file: %w", err)
	}
	l, err := checkTokenFile(f, path, vocab)
	if err != nil {
		f.Close()
		return nil, err
	}
	return &Buffer{name: path, file: f, offset: l.offset, width: l.width, n: l.n}, nil
}

func checkTokenFile(f *os.File, path string, vocab int) (layout, error) {
	st, err := f.Stat()
	if err != nil {
		return layout{}, fmt.Errorf("open token file: %w", err)
	}
	head := make([]byte, headerBytes)
	n, err := f.ReadAt(head, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return layout{}, fmt.Errorf("open token file %s: %w", path, err)
	}
	l, err := parseLayout(head[:n], st.Size())
	if err != nil {
		return layout{}, fmt.Errorf("open token file %s: %w", path, err)
	}
	if vocab > 0 {
		return l, scanTokens(f, path, l, vocab)
	}
	return l, nil
}

// scanTokens checks tokens against the vocabulary.
func scanTokens(f *os.File, path string, l layout, vocab int) error {
	if l.width == 2 && vocab > 0xffff {
		return nil
	}
	r := io.NewSectionReader(f, l.offset, min(l.n*l.width, scanBytes))
	buf := make([]byte, 1<<18)
	for at := int64(0); ; {
		n, err := io.ReadFull(r, buf)
		if i, t := firstBeyond(buf[:n], l.width, uint32(min(int64(vocab), 1<<31))); i >= 0 {
			i += at
			return fmt.Errorf("open token file %s: token %d (at offset %d) is %d, beyond the vocabulary of %d; tokens must be 0 to %d", path, i, l.offset+i*l.width, t, vocab, vocab-1)
		}
		at += int64(n) / l.width
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
			return nil
		case err != nil:
			return fmt.Errorf("open token file %s: %w", path, err)
		}
	}
}
