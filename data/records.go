package data

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Records are JSON objects, one a line of JSON lines or one a row of a Parquet file.

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
		return false, nil // Open reports the error
	}
	fields, err := c.firstRecord()
	return formOf(fields) != noForm, err
}

// noText returns the error for records without a text field or known form; fields are those of the
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
