package data

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
)

// Content returns a hash that identifies the contents of the files at path, whatever their
// names. It covers their kinds, sizes and FingerprintOf, which reads only a sample of large
// files. It is "" if path does not exist, or is a pipe, which can be read only once.
func Content(path string, o Options) (string, error) {
	st, err := os.Stat(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return "", nil
	case err != nil:
		return "", err
	case st.Mode().IsRegular():
		return contentOf([]entry{{path: path, size: st.Size()}})
	case !st.IsDir():
		return "", nil
	}
	if is, err := IsConversations(path, o); err == nil && is {
		o.chat = &chat{}
	}
	c, err := listCorpus([]string{path}, o)
	if err != nil {
		return "", err
	}
	return contentOf(c.files)
}

// ContentOf is Content of a list of files, in that order.
func ContentOf(paths []string) (string, error) {
	var list []entry
	for _, path := range paths {
		st, err := os.Stat(path)
		if err != nil {
			return "", err
		}
		list = append(list, entry{path: path, size: st.Size()})
	}
	return contentOf(list)
}

func contentOf(list []entry) (string, error) {
	b := &fileBytes{list: list}
	defer b.close()
	text := &strings.Builder{}
	for _, e := range list {
		b.n += e.size
		fmt.Fprintln(text, kindOf(e.path), compression(e.path), e.size)
	}
	all, err := FingerprintOf(b)
	if err != nil {
		return "", err
	}
	text.WriteString(all.SHA256)
	sum := sha256.Sum256([]byte(text.String()))
	return fmt.Sprintf("%d bytes of SHA-256 %x…", b.n, sum[:8]), nil
}

// fileBytes is a Source whose tokens are the bytes of files, one after the other. It must be
// read in ascending order.
type fileBytes struct {
	list []entry
	n    int64

	at    int   // index in list of the open file, if one is open
	first int64 // position of its first byte among all files' bytes
	file  *os.File
	buf   []byte
}

func (b *fileBytes) Len() int64 { return b.n }

func (b *fileBytes) Tokens(dst []int32, start int64) error {
	for len(dst) > 0 {
		for b.at < len(b.list) && start >= b.first+b.list[b.at].size {
			b.close()
			b.first += b.list[b.at].size
			b.at++
		}
		if b.at == len(b.list) {
			return io.ErrUnexpectedEOF
		}
		e := &b.list[b.at]
		if b.file == nil {
			f, err := os.Open(e.path)
			if err != nil {
				return err
			}
			b.file = f
		}
		part := min(int64(len(dst)), b.first+e.size-start)
		b.buf = append(b.buf[:0], make([]byte, part)...)
		if _, err := b.file.ReadAt(b.buf, start-b.first); err != nil {
			return fmt.Errorf("%s: %w", e.path, err)
		}
		for i, v := range b.buf {
			dst[i] = int32(v)
		}
		dst, start = dst[part:], start+part
	}
	return nil
}

func (b *fileBytes) close() {
	if b.file != nil {
		_ = b.file.Close()
		b.file = nil
	}
}
