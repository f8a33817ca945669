package data

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"sort"
	"strings"
	"time"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"github.com/spillway-ml/spillway/internal/regular"
)

// kind is the type of a file, judged by its name.
type kind uint8

const (
	plainText kind = iota
	jsonLines
	tokensFile // *.bin
	jsonFile
	htmlFile
	tableFile   // *.arrow
	parquetFile // *.parquet
)

var kinds = map[string]kind{
	".jsonl": jsonLines, ".ndjson": jsonLines, ".bin": tokensFile, ".json": jsonFile,
	".html": htmlFile, ".htm": htmlFile, ".xhtml": htmlFile, ".parquet": parquetFile, ".arrow": tableFile,
}

// compression returns the suffix of a compressed file's name, in lower case; "" if it is not
// compressed.
func compression(name string) string {
	switch ext := strings.ToLower(filepath.Ext(name)); ext {
	case ".gz", ".zst":
		return ext
	}
	return ""
}

// uncompressed returns a file's name without the suffix of its compression.
func uncompressed(name string) string { return name[:len(name)-len(compression(name))] }

func kindOf(name string) kind { return kinds[strings.ToLower(filepath.Ext(uncompressed(name)))] }

// HoldsRecords says whether a file name is that of JSON lines, compressed or not, or of a
// Parquet file.
func HoldsRecords(name string) bool { return kindOf(name).isRecords() }

// why returns the error, with its remedy, for a file that is not read; nil for a file that is.
func (k kind) why(name string, o Options) error {
	switch {
	case k.isRecords() && o.TextField == "" && o.chat == nil:
		return fmt.Errorf("%s holds records: name the field with the text, as in Options.TextField text", name)
	case k == plainText && o.chat != nil:
		return fmt.Errorf("%s is text, not conversations", name)
	case k == jsonFile:
		return fmt.Errorf("%s is JSON, not text: make it JSON lines (*.jsonl, a record a line) and name the field with the text by Options.TextField, or write its text into a .txt file", name)
	case k == htmlFile:
		return fmt.Errorf("%s is HTML, whose tags would be trained on: extract its text into a .txt file", name)
	case k == tableFile:
		return fmt.Errorf("%s is an Arrow table, which is not read: export it as Parquet or JSON lines (*.jsonl) and name the field with the text by Options.TextField", name)
	case k == tokensFile && compression(name) != "":
		return fmt.Errorf("%s is a compressed token file, which can't be read at any place: decompress it first", name)
	case k == tokensFile:
		return fmt.Errorf("%s is a token file, not a text; give it by itself", name)
	}
	return nil
}

// entry is a file to be tokenized.
type entry struct {
	path string
	kind kind
	size int64 // bytes on disk, compressed or not
	mod  time.Time
	only bool // named by the user, not found in a folder: it must be text
}

// open opens the text of a file and decompresses it if need be.
func (e *entry) open() (io.ReadCloser, error) {
	if e.size == 0 && compression(e.path) == "" { // files of /proc also have size 0, and reading them may block forever
		return io.NopCloser(strings.NewReader("")), nil
	}
	f, err := regular.Open(e.path)
	if err != nil {
		return nil, err
	}
	switch compression(e.path) {
	case ".gz":
		z, err := gzip.NewReader(f)
		if err != nil {
			f.Close()
			return nil, fmt.Errorf("read %s: it is not gzip: %w", e.path, err)
		}
		return &unpacked{z, f.Close}, nil
	case ".zst":
		z, err := zstd.NewReader(f, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow))
		if err != nil {
			f.Close()
			return nil, fmt.Errorf("read %s: it is not Zstandard: %w", e.path, err)
		}
		return &unpacked{z, func() error { z.Close(); return f.Close() }}, nil
	}
	return f, nil
}

// maxWindow is the most memory, in bytes, that a .zst file may ask for. zstd's ultra levels and its
// long mode at 27 bits need that much.
const maxWindow = 128 << 20

// unpacked is a decompressor over an open file.
type unpacked struct {
	io.Reader
	close func() error
}

// Read replaces io.ErrUnexpectedEOF by another error if the compressed data ends early. Callers
// would take io.ErrUnexpectedEOF for the end of a file that is shorter than they asked for.
func (u *unpacked) Read(p []byte) (int, error) {
	n, err := u.Reader.Read(p)
	if errors.Is(err, io.ErrUnexpectedEOF) {
		err = errors.New("the compressed data ends early")
	}
	return n, err
}

func (u *unpacked) Close() error { return u.close() }

// corpus is the list of files found under paths, in the order in which they are read.
type corpus struct {
	files     []entry
	looked    int            // files looked at
	left      map[string]int // counts of a folder's files that are not read, by kind
	tokenFile string         // a *.bin file seen in a folder, for the error message
}

// listCorpus finds the files of paths.
func listCorpus(paths []string, o Options) (*corpus, error) {
	if _, err := path.Match(o.Glob, ""); err != nil {
		return nil, fmt.Errorf("pattern %q is malformed; it must be like *.go", o.Glob)
	}
	c := &corpus{left: map[string]int{}}
	for _, root := range paths {
		st, err := os.Stat(root)
		if err != nil {
			return nil, err
		}
		if st.IsDir() {
			if err := c.folder(root, o, []os.FileInfo{st}); err != nil {
				return nil, err
			}
			continue
		}
		if !st.Mode().IsRegular() {
			return nil, fmt.Errorf("%s is neither a regular file nor a folder", root)
		}
		k := kindOf(root)
		if err := k.why(root, o); err != nil {
			return nil, err
		}
		c.looked++
		c.files = append(c.files, entry{root, k, st.Size(), st.ModTime(), true})
	}
	return c, nil
}

// folder walks one folder; above holds it and its parent folders on this walk.
func (c *corpus) folder(dir string, o Options, above []os.FileInfo) error {
	entries, err := os.ReadDir(dir) // sorted by name
	if err != nil {
		return err
	}
	for _, e := range entries {
		name := e.Name()
		if strings.HasPrefix(name, ".spillway-") {
			continue // a checkpoint folder's own files
		}
		full := filepath.Join(dir, name)
		st, err := e.Info()
		if err == nil && st.Mode()&os.ModeSymlink != 0 {
			if st, err = os.Stat(full); errors.Is(err, os.ErrNotExist) {
				err = fmt.Errorf("%s is a link that leads nowhere; remove it, or bring back what it names", full)
			}
		}
		if err != nil {
			if !matches(o.Glob, name) {
				continue
			}
			return err
		}
		switch {
		case st.IsDir():
			if name == ".git" || name == ".hg" || name == ".svn" {
				continue
			}
			for _, a := range above {
				if os.SameFile(a, st) {
					return fmt.Errorf("%s leads back to a folder above it; remove the link, or name a folder without it", full)
				}
			}
			if err := c.folder(full, o, append(above[:len(above):len(above)], st)); err != nil {
				return err
			}
		case st.Mode().IsRegular() && matches(o.Glob, name):
			c.add(full, st, o)
		}
	}
	return nil
}

// matches says whether a pattern matches a file's name, with or without its compression suffix.
// The pattern "" matches all.
func matches(glob, name string) bool {
	if glob == "" {
		return true
	}
	whole, _ := path.Match(glob, name)
	bare, _ := path.Match(glob, uncompressed(name))
	return whole || bare
}

// add appends a folder's file to the corpus, or counts it as left out.
func (c *corpus) add(full string, st os.FileInfo, o Options) {
	c.looked++
	k := kindOf(full)
	if k == tokensFile && c.tokenFile == "" {
		c.tokenFile = full
	}
	if k.why(full, o) != nil {
		what := strings.ToLower(filepath.Ext(uncompressed(full)))
		if k.isRecords() {
			what += " (no Options.TextField)"
		}
		if k == plainText && what == "" {
			what = "text"
		}
		c.left[what]++
		return
	}
	c.files = append(c.files, entry{full, k, st.Size(), st.ModTime(), false})
}

// notText labels files whose content shows that they are not text.
const notText = "not UTF-8 text"

// leftOut counts the files that were left out, in one line; "" if there are none.
func (c *corpus) leftOut() string {
	var parts []string
	for what, n := range c.left {
		parts = append(parts, fmt.Sprintf("%d %s", n, what))
	}
	sort.Strings(parts)
	return strings.Join(parts, ", ")
}

// bytes returns the total size of the files on disk.
func (c *corpus) bytes() (n int64) {
	for i := range c.files {
		n += c.files[i].size
	}
	return n
}

// empty returns the error for a corpus without tokens.
func (c *corpus) empty(root, glob string) error {
	if len(c.files) == 1 && c.files[0].only {
		return fmt.Errorf("%s is empty", root)
	}
	if c.looked == 0 && glob != "" {
		return fmt.Errorf("folder %s has no file that matches %s", root, glob)
	}
	what := "text"
	if glob != "" {
		what += " that matches " + glob
	}
	text := fmt.Sprintf("folder %s has no %s: %d files looked at, none of them UTF-8 without NUL and not empty", root, what, c.looked)
	if left := c.leftOut(); left != "" {
		text += "; left out: " + left
	}
	if c.tokenFile != "" {
		text += fmt.Sprintf("; for tokens name a file, such as %s", c.tokenFile)
	}
	return fmt.Errorf("%s", text)
}

// isRecords says that a file of this kind holds records.
func (k kind) isRecords() bool { return k == jsonLines || k == parquetFile }

// place returns the name of a record in errors.
func (e *entry) place(record int) string {
	if e.kind == parquetFile {
		return fmt.Sprintf("%s, row %d", e.path, record)
	}
	return fmt.Sprintf("%s:%d", e.path, record)
}
