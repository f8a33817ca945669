package data

import (
	"context"
	"fmt"
	"os"
	"slices"

	"github.com/spillway-ml/spillway/data/token"
)

// spillBytes is the number of bytes of tokens that stay in memory. More tokens are written to a
// temporary file without a name, so that a corpus does not exceed the planned memory.
const spillBytes = 4 << 20

// OpenText tokenizes a file of text, JSON lines or Parquet, or the files of a folder, one after another.
// The order is that of the names along the path, recursively. Each file may be compressed (see
// formats.go). A text file is UTF-8 without NUL. Other files of a folder (JSON, HTML, binary files,
// and JSON lines and Parquet if Options.TextField is empty) are left out and counted in Buffer.LeftOut. Such a
// file given by name is an error that says what to do. .git, .hg and .svn are skipped. Between two
// documents (files, or records of JSON lines or Parquet) the tokenizer's EOT is added if it has one. Symbolic
// links are followed. A link that leads back to a folder above it is an error, as is an unreadable
// file. A folder without text is an error that names it.
//
// The text is read as a stream and tokenized on all cores. Tokens have 1, 2 or 4 bytes each,
// depending on the vocabulary. Up to 4 MiB of them are in memory; more are in a temporary file that
// is removed when the process ends.
func OpenText(ctx context.Context, root string, o Options) (*Buffer, error) {
	if o.Tokenizer == nil {
		o.Tokenizer = token.Bytes()
	}
	c, err := listCorpus([]string{root}, o)
	if err != nil {
		return nil, fmt.Errorf("open text: %w", err)
	}
	b := newBuilder(root, o)
	defer b.discard()
	if err := tokenize(ctx, c, o, b, position{}, nil); err != nil {
		return nil, fmt.Errorf("open text: %w", err)
	}
	switch s := o.Split; {
	case s != nil && s.Seen > 0 && s.Taken == 0:
		what := "none is held out"
		if !s.Held {
			what = "all are held out"
		}
		return nil, fmt.Errorf("open text: of the documents in %s (files, or records), %d, %s by share %g and seed %d; give more documents, another share (Config.EvalSplit), or held-out data of its own (Config.EvalData)", root, s.Seen, what, s.Share, s.Seed)
	case b.n == 0:
		return nil, fmt.Errorf("open text: %w", c.empty(root, o.Glob))
	}
	out, err := b.finish()
	if err == nil {
		out.leftOut = c.leftOut()
	}
	return out, err
}

// builder packs tokens.
type builder struct {
	name    string
	tok     token.Tokenizer
	vocab   int
	width   int
	n       int64 // tokens so far
	mem     []byte
	file    *os.File // nil: all is in mem
	base    int64    // bytes of file before the tokens
	spilled int64    // bytes of tokens in file
	after   func()   // removes the file if dropName could not
	named   bool     // the file is the caller's
}

func newBuilder(name string, o Options) *builder {
	b := &builder{name: name, tok: o.Tokenizer, vocab: o.Vocab, width: 4}
	switch v := o.Tokenizer.VocabSize(); {
	case v <= 1<<8:
		b.width = 1
	case v <= 1<<16:
		b.width = 2
	}
	return b
}

// writeError adds the kind of file to the error err of writing the tokens.
func (b *builder) writeError(err error) error {
	if b.named {
		return fmt.Errorf("write the tokens: %w", err)
	}
	return fmt.Errorf("write the tokens to a temporary file (TMPDIR chooses its folder): %w", err)
}

// appendBytes adds text whose bytes are the tokens.
func (b *builder) appendBytes(text []byte) error {
	if b.width == 1 {
		b.mem = append(b.mem, text...)
	} else {
		for _, c := range text {
			b.mem = append(b.mem, c)
			b.mem = append(b.mem, make([]byte, b.width-1)...)
		}
	}
	b.n += int64(len(text))
	return b.spill(spillBytes)
}

func (b *builder) count() int64 { return b.n }

// append adds tokens after checking them against the vocabulary.
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

// spill moves the tokens in memory to the file if they are more than limit bytes.
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
		// Once its name is removed, the file vanishes with the process, however that ends. On
		// systems where an open file cannot lose its name, Close removes it.
		if os.Remove(f.Name()) != nil {
			b.after = func() { os.Remove(f.Name()) }
		}
	}
	if _, err := b.file.WriteAt(b.mem, b.base+b.spilled); err != nil {
		return b.writeError(err)
	}
	b.spilled += int64(len(b.mem))
	b.mem = b.mem[:0]
	return nil
}

// rollBack drops all but the first n tokens.
func (b *builder) rollBack(n int64) error {
	b.n = n
	bytes := n * int64(b.width)
	if bytes >= b.spilled {
		b.mem = b.mem[:bytes-b.spilled]
		return nil
	}
	b.mem, b.spilled = b.mem[:0], bytes
	return b.file.Truncate(b.base + bytes)
}

// finish returns the tokens as a Buffer. Afterwards only discard may be called.
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
