package data

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"time"

	"github.com/spillway-ml/spillway/data/token"
	"github.com/spillway-ml/spillway/internal/aside"
)

// Progress is the progress of Tokenize.
type Progress struct {
	Files, OfFiles int
	Bytes, OfBytes int64 // of the files on disk
	Tokens         int64
}

// Tokenized describes the file that Tokenize wrote.
type Tokenized struct {
	Tokens   int64
	Files    int
	LeftOut  string // see Buffer.LeftOut
	Resumed  bool   // the call continued an interrupted one
	TokenLen int    // bytes per token
}

// keepEvery is how often an unfinished token file and its journal are synced, so that an
// interrupted run can continue there.
const keepEvery = 5 * time.Second

// journal is the saved state of an unfinished token file, in a file beside it.
type journal struct {
	Version   int      `json:"version"`
	Tokenizer string   `json:"tokenizer"`
	TextField string   `json:"text_field"`
	Files     string   `json:"files"` // SHA-256 of the files' names, sizes and times
	At        position `json:"at"`
	Tokens    int64    `json:"tokens"` // in the file, up to At
	LeftOut   int      `json:"left_out_by_content"`
}

// Tokenize writes the tokens of text files, JSON lines and folders of them to a token file for
// OpenTokenFile. That is raw little-endian uint16 if the tokenizer's vocabulary is at most
// 65,536, otherwise llm.c's format of uint32. The tokens are those of OpenText. It tokenizes on
// Options.Threads goroutines.
//
// The file gets its name when it is complete. Until then it is out.partial, with a journal in
// out.partial.json. A call with the same files and options continues an interrupted one; a call
// with others is refused.
func Tokenize(ctx context.Context, out string, paths []string, o Options, tell func(Progress)) (Tokenized, error) {
	if o.Tokenizer == nil {
		o.Tokenizer = token.Bytes()
	}
	c, err := listCorpus(paths, o)
	if err != nil {
		return Tokenized{}, fmt.Errorf("tokenize: %w", err)
	}
	if err := notAnInput(out, c); err != nil {
		return Tokenized{}, fmt.Errorf("tokenize: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(out), 0o755); err != nil {
		return Tokenized{}, fmt.Errorf("tokenize: %w", err)
	}
	w := &tokenWriter{out: out, corpus: c, b: newBuilder(out, o), tell: tell, kept: time.Now(),
		j: journal{Version: 1, Tokenizer: o.Tokenizer.Name(), TextField: o.TextField, Files: c.fingerprint()}}
	res, err := w.run(ctx, o)
	if err != nil {
		return res, fmt.Errorf("tokenize: %w", err)
	}
	if res.Tokens == 0 {
		return res, fmt.Errorf("tokenize: %w", c.empty(paths[0], o.Glob))
	}
	return res, nil
}

// notAnInput refuses to overwrite an input file.
func notAnInput(out string, c *corpus) error {
	st, err := os.Stat(out)
	if err != nil {
		return nil // it does not exist
	}
	if !st.Mode().IsRegular() {
		return fmt.Errorf("%s is not a regular file; the tokens can't be written there", out)
	}
	for i := range c.files {
		if in, err := os.Stat(c.files[i].path); err == nil && os.SameFile(st, in) {
			return fmt.Errorf("%s is one of the files that are read; write to another", out)
		}
	}
	return nil
}

// fingerprint returns a hash of the files' names, sizes and times.
func (c *corpus) fingerprint() string {
	h := sha256.New()
	for i := range c.files {
		e := &c.files[i]
		fmt.Fprintf(h, "%q %d %d\n", e.path, e.size, e.mod.UnixNano())
	}
	return hex.EncodeToString(h.Sum(nil))
}

// tokenWriter writes a token file that can be continued after an interruption.
type tokenWriter struct {
	out     string
	corpus  *corpus
	b       *builder
	j       journal
	kept    time.Time // when the journal was last written
	tell    func(Progress)
	dropped int // files left out because of their content in earlier calls
}

func (w *tokenWriter) partial() string { return w.out + ".partial" }
func (w *tokenWriter) about() string   { return w.out + ".partial.json" }

func (w *tokenWriter) run(ctx context.Context, o Options) (res Tokenized, err error) {
	w.b.width = max(w.b.width, 2)
	if w.b.width == 4 {
		w.b.base = headerBytes
	}
	res.TokenLen = w.b.width
	if res.Resumed, err = w.open(); err != nil {
		return res, err
	}
	defer w.b.file.Close()
	err = tokenize(ctx, w.corpus, o, w.b, w.j.At, w.after)
	if n := w.dropped; n > 0 {
		w.corpus.left[notText] += n
	}
	res.Tokens, res.LeftOut, res.Files = w.b.n, w.corpus.leftOut(), len(w.corpus.files)-w.corpus.left[notText]
	if err != nil {
		if w.j.Tokens > 0 && errors.Is(err, context.Canceled) {
			return res, errors.Join(err, w.keep())
		}
		return res, err
	}
	if res.Tokens == 0 {
		return res, errors.Join(os.Remove(w.partial()), removeIfThere(w.about()))
	}
	return res, w.finish()
}

// open opens the unfinished file where an earlier call left it, or makes a new one.
func (w *tokenWriter) open() (resumed bool, err error) {
	var old journal
	text, err := os.ReadFile(w.about())
	switch {
	case errors.Is(err, os.ErrNotExist):
	case err != nil:
		return false, err
	default:
		if err := json.Unmarshal(text, &old); err != nil || old.Version != w.j.Version {
			return false, fmt.Errorf("%s is not what an unfinished run writes; remove it and %s to begin again", w.about(), w.partial())
		}
		if differs := w.differs(old); differs != "" {
			return false, fmt.Errorf("%s was begun with %s; give the same again to go on, or remove it and %s to begin again", w.partial(), differs, w.about())
		}
	}
	f, err := os.OpenFile(w.partial(), os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return false, err
	}
	w.b.file, w.b.named = f, true
	bytes := old.Tokens * int64(w.b.width)
	if st, err := f.Stat(); err != nil || old.Tokens > 0 && st.Size() < w.b.base+bytes {
		f.Close()
		return false, errors.Join(err, fmt.Errorf("%s is shorter than %s says; remove both to begin again", w.partial(), w.about()))
	}
	if err := f.Truncate(w.b.base + bytes); err != nil {
		f.Close()
		return false, err
	}
	w.b.n, w.b.spilled, w.j.Tokens, w.j.At, w.dropped = old.Tokens, bytes, old.Tokens, old.At, old.LeftOut
	return old.Tokens > 0, nil
}

// differs says how the unfinished file's options or inputs differ from this call's.
func (w *tokenWriter) differs(old journal) string {
	switch {
	case old.Tokenizer != w.j.Tokenizer:
		return "tokenizer " + old.Tokenizer
	case old.TextField != w.j.TextField:
		return fmt.Sprintf("Options.TextField %q", old.TextField)
	case old.Files != w.j.Files:
		return "other files, or before these were changed"
	}
	return ""
}

// after records a position, and calls keep every keepEvery.
func (w *tokenWriter) after(at position) error {
	w.j.At, w.j.Tokens = at, w.b.n
	if w.tell != nil {
		p := Progress{Files: at.File, OfFiles: len(w.corpus.files), OfBytes: w.corpus.bytes(), Tokens: w.b.n}
		for i := range at.File {
			p.Bytes += w.corpus.files[i].size
		}
		if at.File < len(w.corpus.files) {
			p.Bytes += min(at.Offset, w.corpus.files[at.File].size) // an estimate for a compressed file
		}
		w.tell(p)
	}
	if time.Since(w.kept) < keepEvery {
		return nil
	}
	return w.keep()
}

// keep syncs the file up to the journal's position and writes the journal.
func (w *tokenWriter) keep() error {
	w.kept = time.Now()
	if err := w.b.spill(0); err != nil {
		return err
	}
	if err := w.b.file.Sync(); err != nil {
		return err
	}
	w.j.LeftOut = w.dropped + w.corpus.left[notText]
	text, err := json.Marshal(w.j)
	if err != nil {
		return err
	}
	return aside.WriteBytes(w.about(), text, 0o644)
}

// finish gives the complete file its name.
func (w *tokenWriter) finish() error {
	if err := w.b.spill(0); err != nil {
		return err
	}
	if w.b.width == 4 {
		if w.b.n > math.MaxInt32 {
			return fmt.Errorf("%d tokens of 4 bytes: the format's header counts up to %d; tokenize in parts", w.b.n, math.MaxInt32)
		}
		head := make([]byte, headerBytes)
		binary.LittleEndian.PutUint32(head, magicUint32)
		binary.LittleEndian.PutUint32(head[4:], versionLlama)
		binary.LittleEndian.PutUint32(head[8:], uint32(w.b.n))
		if _, err := w.b.file.WriteAt(head, 0); err != nil {
			return err
		}
	}
	if err := w.b.file.Sync(); err != nil {
		return err
	}
	if err := os.Rename(w.partial(), w.out); err != nil {
		return err
	}
	return removeIfThere(w.about())
}

func removeIfThere(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}
