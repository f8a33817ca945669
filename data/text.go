package data

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"unicode/utf8"
)

const (
	// readBytes is how much text is read, and about how much is tokenized, at
	// a time.
	readBytes = 1 << 20
	// spillBytes is how many bytes of tokens stay in memory; beyond, they go to
	// a temporary file without a name, so that a corpus does not count against
	// the memory that the plan promises.
	spillBytes = 4 << 20
)

// OpenText tokenizes a text file, or the text files of a folder in name order
// (by the names along the path, folders in place, recursively), one after
// another. A text file is UTF-8 without NUL; others in a folder are passed
// over, as are .git, .hg and .svn. Between two files of a folder comes the
// tokenizer's EOT if it has one. Symbolic links are followed; one that leads
// back to a folder above it is an error, as is an unreadable file. A folder
// with no text is an error that names it.
//
// The text is read as a stream; the tokens, of 1, 2 or 4 bytes each by the
// vocabulary, are in memory up to 4 MiB and beyond in a temporary file that
// vanishes with the process.
func OpenText(root string, o Options) (*Buffer, error) {
	if o.Tokenizer == nil {
		o.Tokenizer = Bytes()
	}
	if _, err := path.Match(o.Glob, ""); err != nil {
		return nil, fmt.Errorf("open text: pattern %q is malformed; it must be like *.go", o.Glob)
	}
	st, err := os.Stat(root)
	if err != nil {
		return nil, fmt.Errorf("open text: %w", err)
	}
	b := newBuilder(root, o)
	defer b.discard()
	if !st.IsDir() {
		if !st.Mode().IsRegular() {
			return nil, fmt.Errorf("open text: %s is neither a regular file nor a folder", root)
		}
		if err := b.addFile(root); err != nil {
			return nil, fmt.Errorf("open text: %w", err)
		}
		if b.n == 0 {
			return nil, fmt.Errorf("open text: %s is empty", root)
		}
		return b.finish()
	}
	w := walker{glob: o.Glob, add: b.addOne}
	if err := w.folder(root, []os.FileInfo{st}); err != nil {
		return nil, fmt.Errorf("open text: %w", err)
	}
	if b.n == 0 {
		what := "text"
		if o.Glob != "" {
			what += " that matches " + o.Glob
		}
		hint := ""
		if w.tokenFile != "" {
			hint = fmt.Sprintf("; for tokens name a file, such as %s", w.tokenFile)
		}
		return nil, fmt.Errorf("open text: folder %s has no %s: %d files looked at, none of them UTF-8 without NUL and not empty%s", root, what, w.files, hint)
	}
	return b.finish()
}

// walker finds the files of a folder.
type walker struct {
	glob      string
	add       func(path string) error
	files     int    // looked at
	tokenFile string // a *.bin seen
}

// folder walks one folder; above holds it and the folders that lead to it.
func (w *walker) folder(dir string, above []os.FileInfo) error {
	entries, err := os.ReadDir(dir) // sorted by name
	if err != nil {
		return err
	}
	for _, e := range entries {
		name := e.Name()
		full := filepath.Join(dir, name)
		st, err := e.Info()
		if err == nil && st.Mode()&os.ModeSymlink != 0 {
			st, err = os.Stat(full)
		}
		if err != nil {
			if ok, _ := path.Match(w.glob, name); w.glob != "" && !ok {
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
			if err := w.folder(full, append(above[:len(above):len(above)], st)); err != nil {
				return err
			}
		case st.Mode().IsRegular():
			if ok, _ := path.Match(w.glob, name); w.glob != "" && !ok {
				continue
			}
			if strings.HasSuffix(name, ".bin") && w.tokenFile == "" {
				w.tokenFile = full
			}
			w.files++
			if err := w.add(full); err != nil {
				return err
			}
		}
	}
	return nil
}

// builder packs tokens.
type builder struct {
	name    string
	tok     Tokenizer
	cutter  cutter // nil: a file is tokenized in one piece
	vocab   int
	width   int
	n       int64 // tokens so far
	mem     []byte
	file    *os.File // nil: all is in mem
	spilled int64    // bytes in file
	after   func()   // removes the file where dropName could not
	read    []byte   // of one file, not yet tokenized
}

func newBuilder(name string, o Options) *builder {
	b := &builder{name: name, tok: o.Tokenizer, vocab: o.Vocab, width: 4}
	b.cutter, _ = o.Tokenizer.(cutter)
	switch v := o.Tokenizer.VocabSize(); {
	case v <= 1<<8:
		b.width = 1
	case v <= 1<<16:
		b.width = 2
	}
	return b
}

// errNotText marks a file that is passed over in a folder.
type errNotText struct{ error }

// addOne adds a folder's file: EOT, if another came before, and its tokens; or
// nothing if it is empty or not text.
func (b *builder) addOne(path string) error {
	before := b.n
	if eot := b.tok.EOT(); b.n > 0 && eot >= 0 {
		if err := b.append([]int32{eot}, path); err != nil {
			return err
		}
	}
	start := b.n
	err := b.addFile(path)
	if err == nil && b.n > start {
		return nil
	}
	if _, ok := errors.AsType[errNotText](err); err != nil && !ok {
		return err
	}
	return b.rollBack(before)
}

// addFile adds the tokens of a text file.
func (b *builder) addFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	var (
		text    = b.read[:0] // read, not yet tokenized
		checked = 0          // text[:checked] is UTF-8 without NUL
		tried   = 0          // text[:tried] holds no place to cut
		at      = int64(0)   // offset of text[0]
	)
	defer func() { b.read = text[:0] }()
	for {
		text = slices.Grow(text, readBytes)
		n, err := io.ReadFull(f, text[len(text):len(text)+readBytes])
		text = text[:len(text)+n]
		end := errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
		if err != nil && !end {
			return fmt.Errorf("read %s: %w", path, err)
		}
		if err := checkText(text, &checked, end); err != nil {
			return errNotText{fmt.Errorf("%s is not text: %w", path, withOffset(err, at))}
		}
		cut := 0
		if end {
			cut = len(text)
		} else if b.cutter != nil {
			if cut = b.cutter.cut(text[:checked], tried); cut == 0 {
				tried = checked
			}
		}
		if cut > 0 {
			if err := b.encode(text[:cut], path); err != nil {
				return err
			}
			text = text[:copy(text, text[cut:])]
			checked -= cut
			tried = 0
			at += int64(cut)
		}
		if end {
			return nil
		}
	}
}

type textError struct {
	what   string
	offset int64
}

func (e *textError) Error() string {
	return fmt.Sprintf("%s at offset %d; text is UTF-8 without NUL", e.what, e.offset)
}

func withOffset(e *textError, at int64) error {
	return &textError{e.what, at + e.offset}
}

// checkText moves *checked over valid characters: to the end of text, or up to
// a character that more text may complete.
func checkText(text []byte, checked *int, end bool) *textError {
	rest := text[*checked:]
	whole := len(rest)
	if !end {
		for i := 1; i < utf8.UTFMax && i <= len(rest); i++ {
			if b := rest[len(rest)-i]; utf8.RuneStart(b) {
				if !utf8.FullRune(rest[len(rest)-i:]) {
					whole = len(rest) - i
				}
				break
			}
		}
	}
	if i := slices.Index(rest[:whole], 0); i >= 0 {
		return &textError{"a NUL byte", int64(*checked + i)}
	}
	if !utf8.Valid(rest[:whole]) {
		i := 0
		for {
			r, n := utf8.DecodeRune(rest[i:whole])
			if r == utf8.RuneError && n <= 1 {
				return &textError{fmt.Sprintf("byte %#02x is not UTF-8", rest[i]), int64(*checked + i)}
			}
			i += n
		}
	}
	*checked += whole
	return nil
}

// encode adds the tokens of a text.
func (b *builder) encode(text []byte, path string) error {
	if _, ok := b.tok.(byteTokenizer); ok && (b.vocab == 0 || b.vocab >= 256) {
		b.mem = append(b.mem, text...)
		b.n += int64(len(text))
		return b.spill(spillBytes)
	}
	return b.append(b.tok.Encode(string(text)), path)
}

// append adds tokens, checked against the vocabulary.
func (b *builder) append(tokens []int32, path string) error {
	limit := uint32(b.tok.VocabSize())
	for i, t := range tokens {
		if b.vocab > 0 && t >= 0 && int64(t) >= int64(b.vocab) {
			return fmt.Errorf("token %d of %s (in %s) is %d, beyond the model's vocabulary of %d; tokenizer %s has %d tokens", b.n+int64(i), b.name, path, t, b.vocab, b.tok.Name(), b.tok.VocabSize())
		}
		if uint32(t) >= limit {
			return fmt.Errorf("tokenizer %s gave token %d for %s; its own vocabulary is %d", b.tok.Name(), t, path, limit)
		}
		switch b.width {
		case 1:
			b.mem = append(b.mem, byte(t))
		case 2:
			b.mem = append(b.mem, byte(t), byte(t>>8))
		default:
			b.mem = append(b.mem, byte(t), byte(t>>8), byte(t>>16), byte(t>>24))
		}
	}
	b.n += int64(len(tokens))
	return b.spill(spillBytes)
}

// spill moves the tokens in memory to the file if they take over limit bytes.
func (b *builder) spill(limit int) error {
	if len(b.mem) <= limit {
		return nil
	}
	if b.file == nil {
		f, err := os.CreateTemp("", "spillway-tokens-*")
		if err != nil {
			return fmt.Errorf("make a temporary file for the tokens (TMPDIR chooses its folder): %w", err)
		}
		b.file = f
		// Without its name the file vanishes with the process, however that
		// ends. Where an open file cannot lose its name, it goes at Close.
		if os.Remove(f.Name()) != nil {
			b.after = func() { os.Remove(f.Name()) }
		}
	}
	if _, err := b.file.WriteAt(b.mem, b.spilled); err != nil {
		return fmt.Errorf("write the tokens to a temporary file (TMPDIR chooses its folder): %w", err)
	}
	b.spilled += int64(len(b.mem))
	b.mem = b.mem[:0]
	return nil
}

// rollBack forgets all but the first n tokens.
func (b *builder) rollBack(n int64) error {
	b.n = n
	bytes := n * int64(b.width)
	if bytes >= b.spilled {
		b.mem = b.mem[:bytes-b.spilled]
		return nil
	}
	b.mem, b.spilled = b.mem[:0], bytes
	return b.file.Truncate(bytes)
}

// finish gives the tokens. The builder must not be used after, but for
// discard.
func (b *builder) finish() (*Buffer, error) {
	out := &Buffer{name: b.name, width: int64(b.width), n: b.n}
	if b.file == nil {
		out.data = slices.Clip(b.mem)
		return out, nil
	}
	if err := b.spill(0); err != nil {
		return nil, fmt.Errorf("open text: %w", err)
	}
	out.file, out.after = b.file, b.after
	b.file = nil
	return out, nil
}

func (b *builder) discard() {
	if b.file != nil {
		b.file.Close()
		if b.after != nil {
			b.after()
		}
	}
}
