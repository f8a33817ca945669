package data

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
)

// stat is os.Stat with an error that says which data are accepted.
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

// Readable returns an error if the name, kind or size of the data at a path show that it cannot be
// read.
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

// Size returns the size in bytes of the files at a path that are read completely; 0 for token
// files.
func Size(path string, o Options) (n int64) {
	if strings.HasSuffix(path, ".bin") {
		return 0
	}
	o.chat = &chat{} // also accepts records without a text field
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
