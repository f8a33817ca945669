// Package data turns token files and text into batches.
//
// A Source is a sequence of tokens: a token file, or text run through a Tokenizer. A Sampler
// decides which window of it each row of each batch is, as a pure function of (step,
// micro-batch, rank, row). A resumed run therefore continues with exactly the batches of an
// uninterrupted one, and no state is saved.
package data

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
)

// Source is a sequence of tokens. Its methods may be called concurrently.
type Source interface {
	// Len is the number of tokens.
	Len() int64
	// Tokens fills dst with tokens [start, start+len(dst)). A range outside of
	// the source is an error.
	Tokens(dst []int32, start int64) error
}

// TargetSource is a Source whose targets are not its next tokens.
type TargetSource interface {
	Source
	// Targets fills dst with the targets of the inputs [start,
	// start+len(dst)). -1 is ignored in the loss and in its count.
	Targets(dst []int32, start int64) error
}

// Options says how Open reads data.
type Options struct {
	// Tokenizer reads text. Nil means bytes. Token files do not use it.
	Tokenizer Tokenizer
	// Vocab is the model's vocabulary: a token at or beyond it is an error that
	// names the token and its index. 0 means the tokenizer's for text and no
	// check for a token file.
	Vocab int
	// Glob, as in path.Match on a file's base name, limits which files of a
	// folder are read, such as "*.go". Empty means all.
	Glob string
	// TextField is the field of the records of JSON lines (*.jsonl) that holds
	// their text. Empty: none, and JSON lines are refused.
	TextField string
	// Threads bounds the goroutines that tokenize. 0 means all cores.
	Threads int
	// Split selects a part of the documents; nil selects all. Token files have no documents.
	Split *Split

	chat *chat // set if the data are conversations
}

// Split divides documents into a held-out part and the rest. The seed decides; Share is the
// held-out fraction. Opening text with a Split counts its documents in Seen and Taken.
type Split struct {
	Seed  int64
	Share float64
	Held  bool // selects the held-out part; otherwise the rest

	Seen, Taken int // documents
}

// takes says whether the next document belongs to the selected part.
func (s *Split) takes() bool {
	i := s.Seen
	s.Seen++
	held := s.Share > 0 && float64(mix64(uint64(s.Seed)+mix64(uint64(i)+1))>>11)/(1<<53) < s.Share
	if held != s.Held {
		return false
	}
	s.Taken++
	return true
}

// stat looks at data.
func stat(path string) (os.FileInfo, error) {
	st, err := os.Stat(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("open data: %s does not exist; it must be a *.bin token file, a text or *.jsonl file (or either as .gz or .zst), or a folder of them", path)
	}
	if err != nil {
		return nil, fmt.Errorf("open data: %w", err)
	}
	return st, nil
}

// Readable says why data at a path cannot be read at all, by its name, kind and size alone.
func Readable(path string) error {
	st, err := stat(path)
	if err != nil || st.IsDir() {
		return err
	}
	switch k := kindOf(path); {
	case k == jsonFile || k == htmlFile || k == tableFile:
		return k.why(path, Options{})
	case k.isRecords() && st.Size() == 0:
		return noText(path, nil)
	}
	return nil
}

// Size is the size of the files at a path that are read as a whole, in bytes: 0 of tokens.
func Size(path string, o Options) (n int64) {
	if strings.HasSuffix(path, ".bin") {
		return 0
	}
	o.chat = &chat{} // takes records without a text field too
	for _, o := range []Options{o, {Glob: o.Glob, TextField: o.TextField}} {
		if c, err := listCorpus([]string{path}, o); err == nil {
			n = max(n, c.bytes())
		}
	}
	return n
}

// Open opens a path. A *.bin file holds tokens (OpenTokenFile); another file is text or JSON
// lines, possibly compressed. A folder holds such files, which are read in name order
// (OpenText). Close the result when done.
func Open(ctx context.Context, path string, o Options) (*Buffer, error) {
	st, err := stat(path)
	if err != nil {
		return nil, err
	}
	if !st.IsDir() && strings.HasSuffix(path, ".bin") {
		if o.Split != nil {
			return nil, fmt.Errorf("open data: %s is a token file, in which documents cannot be told apart, so none can be held out; split the text before it is tokenized", path)
		}
		return OpenTokenFile(path, o.Vocab)
	}
	if !st.IsDir() && kindOf(path).isRecords() && o.TextField == "" {
		c, err := listCorpus([]string{path}, Options{chat: &chat{}})
		if err != nil {
			return nil, fmt.Errorf("open data: %w", err)
		}
		fields, err := c.firstRecord()
		if err == nil {
			err = noText(path, fields)
		}
		return nil, fmt.Errorf("open data: %w", err)
	}
	return OpenText(ctx, path, o)
}

// DefaultOrder is the order for a path if none is configured: Shuffled for a folder, Sequential
// for a file.
func DefaultOrder(path string) Order {
	if st, err := os.Stat(path); err == nil && st.IsDir() {
		return Shuffled
	}
	return Sequential
}
