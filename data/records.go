package data

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/parquet-go/parquet-go"
)

// Records are JSON objects, one a line of JSON lines or one a row of a Parquet file.

// isRecords says that a file of this kind holds records.
func (k kind) isRecords() bool { return k == jsonLines || k == parquetFile }

// place names a record in errors.
func (e *entry) place(record int) string {
	if e.kind == parquetFile {
		return fmt.Sprintf("%s, row %d", e.path, record)
	}
	return fmt.Sprintf("%s:%d", e.path, record)
}

// eachRow calls give with each row of a Parquet file, encoded as JSON.
func (e *entry) eachRow(give func(row int, record []byte) error) (err error) {
	defer func() {
		if p := recover(); p != nil { // parquet-go panics on some damaged files
			err = fmt.Errorf("%s is damaged: %v", e.path, p)
		}
	}()
	f, err := e.open()
	if err != nil {
		return err
	}
	defer f.Close()
	at, ok := f.(io.ReaderAt)
	if !ok {
		return fmt.Errorf("%s is compressed as a whole, which Parquet files are not; decompress it first", e.path)
	}
	file, err := parquet.OpenFile(at, e.size)
	if err != nil {
		return fmt.Errorf("%s is not a Parquet file: %w", e.path, err)
	}
	r := parquet.NewGenericReader[any](file, file.Schema())
	defer r.Close()
	rows := make([]any, 64)
	for row := 1; ; {
		n, err := r.Read(rows)
		for _, v := range rows[:n] {
			record, err := json.Marshal(v)
			if err != nil {
				return fmt.Errorf("%s: %w", e.place(row), err)
			}
			if err := give(row, record); err != nil {
				return err
			}
			row++
		}
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return fmt.Errorf("read %s: %w", e.path, err)
		}
	}
}

// form is how a record's fields hold a conversation.
type form uint8

const (
	noForm form = iota
	messagesForm
	responseForm    // prompt, response
	instructionForm // instruction, input (optional), output
)

func (f form) String() string {
	return [...]string{"none", "messages", "prompt and response", "instruction, input and output"}[f]
}

// formOf returns the form of a record, judged by its field names.
func formOf(record map[string]json.RawMessage) form {
	has := func(names ...string) bool {
		return !slices.ContainsFunc(names, func(n string) bool { return !given(record, n) })
	}
	switch {
	case has("messages"):
		return messagesForm
	case has("prompt", "response"):
		return responseForm
	case has("instruction", "output"):
		return instructionForm
	}
	return noForm
}

var errEnough = errors.New("enough")

// firstRecord reads the fields of the first record of a corpus; nil if it has none.
func (c *corpus) firstRecord() (fields map[string]json.RawMessage, err error) {
	for i := range c.files {
		e := &c.files[i]
		if !e.kind.isRecords() {
			continue
		}
		take := func(record []byte) error {
			if json.Unmarshal(record, &fields) != nil || fields == nil {
				fields = map[string]json.RawMessage{}
			}
			return errEnough
		}
		if e.kind == parquetFile {
			err = e.eachRow(func(_ int, record []byte) error { return take(record) })
		} else {
			d := documents{c: c, o: Options{chat: &chat{}}, give: func(p *piece) error {
				for _, part := range p.parts {
					return take(part.text)
				}
				return nil
			}, first: true}
			err = d.file(i, 0)
		}
		if errors.Is(err, errEnough) {
			return fields, nil
		}
		if err != nil {
			return nil, err
		}
	}
	return nil, nil
}

// IsConversations says whether the data at path are conversations: JSON lines or Parquet files
// whose first record has the fields messages, prompt and response, or instruction and output.
func IsConversations(path string, o Options) (bool, error) {
	if path == "" || o.TextField != "" || strings.HasSuffix(path, ".bin") {
		return false, nil
	}
	o.chat = &chat{}
	c, err := listCorpus([]string{path}, o)
	if err != nil || len(c.files) == 0 {
		return false, nil // Open says what is wrong
	}
	fields, err := c.firstRecord()
	return formOf(fields) != noForm, err
}

// noText is the error for records without a text field or known form; fields are those of the
// first record.
func noText(path string, fields map[string]json.RawMessage) error {
	names := slices.Sorted(maps.Keys(fields))
	const forms = "conversations have messages, prompt and response, or instruction and output"
	switch {
	case fields == nil:
		return fmt.Errorf("%s holds no record: it is empty; give records, one JSON object a line, as in {\"prompt\": \"…\", \"response\": \"…\"}", path)
	case len(names) == 0:
		return fmt.Errorf("%s: its first record is not a JSON object with fields; write one object a line; %s", path, forms)
	}
	text := strings.Join(names, ", ")
	if len(text) > 200 {
		text = text[:200] + "…"
	}
	return fmt.Errorf("%s holds records with the fields %s: name the field with the text, as in Options.TextField text; %s", path, bytes.ToValidUTF8([]byte(text), []byte("…")), forms)
}
