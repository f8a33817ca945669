package data

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"unicode/utf8"

	"github.com/spillway-ml/spillway/data/token"
)

// piece is a run of one file's text that is tokenized as a unit.
type piece struct {
	file  int // index in the corpus
	parts []part
	end   int64 // offset in the file's text at which the next piece starts
	// last says that the file ends here. If drop is not nil, the file is not text for that reason,
	// and none of it is kept.
	last bool
	drop error
}

// part is text of one document, or of a section of it.
type part struct {
	text   []byte
	starts bool // this part begins a document
	record int  // number in its file, from 1; 0: not a record
}

// position is a boundary between two pieces of a corpus.
type position struct {
	File   int   `json:"file"`
	Offset int64 `json:"offset"` // in the file's text, in bytes
	Before int64 `json:"before"` // number of tokens before that file
}

// documents reads the pieces of a corpus from a position on.
type documents struct {
	c      *corpus
	o      Options
	cutter token.Cutter // nil: a file is tokenized in one piece
	give   func(*piece) error
	read   []byte // text of the current file that is not in a piece yet
	first  bool   // each record is a separate piece
}

func (d *documents) run(from position) error {
	for i := from.File; i < len(d.c.files); i++ {
		if err := d.file(i, from.Offset); err != nil {
			return err
		}
		from.Offset = 0
	}
	return nil
}

// file reads the pieces of one file and skips its first skip bytes.
func (d *documents) file(i int, skip int64) error {
	e := &d.c.files[i]
	if e.kind == parquetFile {
		return d.rows(i)
	}
	r, err := e.open()
	if err != nil {
		return err
	}
	defer r.Close()
	if _, err := io.CopyN(io.Discard, r, skip); err != nil {
		return fmt.Errorf("read %s: go on at byte %d of its text: %w", e.path, skip, err)
	}
	if e.kind == jsonLines {
		return d.lines(i, r, skip)
	}
	return d.text(i, r, skip)
}

// longStretch is the most text, in bytes, that is buffered in search of a place to cut. Text in a
// human language has such a place earlier.
const longStretch = 4 << 20

// place returns where to cut the buffered text, 0 if it needs more. The result depends only on
// what follows the last cut, not on how much of it is buffered.
func (d *documents) place(text []byte, checked, tried int, end bool) int {
	stretch := min(checked, longStretch)
	switch {
	case end && (d.cutter == nil || len(text) <= longStretch):
		return len(text)
	case d.cutter == nil:
		return 0
	}
	cut := d.cutter.Cut(text[:stretch], min(tried, stretch))
	if cut == 0 && stretch == longStretch {
		cut = d.cutter.Within(text[:stretch])
	}
	if cut == 0 && end {
		cut = len(text)
	}
	return cut
}

// text reads a text file in pieces of about readBytes, cut at token boundaries.
func (d *documents) text(file int, r io.Reader, at int64) error {
	path := d.c.files[file].path
	var (
		text    = d.read[:0] // read and not yet in a piece
		checked = 0          // text[:checked] is UTF-8 without NUL
		tried   = 0          // text[:tried] has no place to cut
		starts  = at == 0
	)
	defer func() { d.read = text[:0] }()
	for {
		text = slices.Grow(text, readBytes)
		n, err := io.ReadFull(r, text[len(text):len(text)+readBytes])
		text = text[:len(text)+n]
		end := errors.Is(err, io.EOF) || err == io.ErrUnexpectedEOF && n < readBytes
		if err != nil && !end {
			return fmt.Errorf("read %s: %w", path, err)
		}
		if err := checkText(text, &checked, end); err != nil {
			return d.give(&piece{file: file, last: true, drop: fmt.Errorf("%s is not text: %w", path, withOffset(err, at))})
		}
		for {
			cut := d.place(text, checked, tried, end)
			last := end && cut == len(text)
			if cut == 0 && !last {
				tried = checked
				break
			}
			at += int64(cut)
			p := &piece{file: file, parts: []part{{bytes.Clone(text[:cut]), starts, 0}}, end: at, last: last}
			if err := d.give(p); err != nil {
				return err
			}
			if last {
				return nil
			}
			starts = false
			text = text[:copy(text, text[cut:])]
			checked -= cut
			tried = 0
		}
	}
}

// Bounds of JSON lines.
const (
	maxLine    = 256 << 20 // bytes per record
	batchBytes = 256 << 10 // bytes of text in records that are tokenized together
)

// byteOrderMark is U+FEFF in UTF-8. Some programs write it at the start of a file.
var byteOrderMark = []byte("\uFEFF")

// lines reads the text of the records of a JSON lines file.
func (d *documents) lines(file int, r io.Reader, skip int64) error {
	at := skip
	path := d.c.files[file].path
	in := bufio.NewReaderSize(r, readBytes)
	p, size := &piece{file: file}, 0
	where := func(line int) string {
		if skip > 0 {
			return fmt.Sprintf("%s, line %d after byte %d of its text", path, line, skip)
		}
		return fmt.Sprintf("%s:%d", path, line)
	}
	for line := 1; ; line++ {
		text, err := readLine(in)
		if err != nil && !errors.Is(err, io.EOF) {
			return fmt.Errorf("read %s: %w", where(line), err)
		}
		end := err != nil
		at += int64(len(text))
		if line == 1 && skip == 0 {
			text = bytes.TrimPrefix(text, byteOrderMark)
		}
		if text = bytes.TrimSpace(text); len(text) > 0 {
			doc, err := d.field(text)
			if err != nil {
				return fmt.Errorf("read %s: %w", where(line), err)
			}
			p.parts = append(p.parts, part{doc, true, line})
			size += len(doc)
		}
		if size >= batchBytes || end || d.first {
			p.end, p.last = at, end
			if err := d.give(p); err != nil {
				return err
			}
			p, size = &piece{file: file}, 0
		}
		if end {
			return nil
		}
	}
}

// rows reads the rows of a Parquet file, several to a piece.
func (d *documents) rows(file int) error {
	p, size := &piece{file: file}, 0
	e := &d.c.files[file]
	err := e.eachRow(func(row int, record []byte) error {
		doc, err := d.field(record)
		if err != nil {
			return fmt.Errorf("read %s: %w", e.place(row), err)
		}
		p.parts = append(p.parts, part{doc, true, row})
		if size += len(doc); size < batchBytes {
			return nil
		}
		full := p
		p, size = &piece{file: file}, 0
		return d.give(full)
	})
	if err != nil {
		return err
	}
	p.last = true
	return d.give(p)
}

// readLine reads up to and including a line end, or up to the end of the file.
func readLine(in *bufio.Reader) (line []byte, err error) {
	for {
		more, err := in.ReadSlice('\n')
		line = append(line, more...)
		if len(line) > maxLine {
			return nil, fmt.Errorf("the record is over %d bytes; JSON lines have a record a line", maxLine)
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			return line, err
		}
	}
}

// field returns the text of a record, or the complete record for a conversation.
func (d *documents) field(line []byte) ([]byte, error) {
	if !utf8.Valid(line) {
		return nil, errors.New("the record is not UTF-8")
	}
	if d.o.chat != nil {
		return bytes.Clone(line), nil
	}
	var record map[string]json.RawMessage
	if err := json.Unmarshal(line, &record); err != nil {
		return nil, fmt.Errorf("the record is not a JSON object: %w", err)
	}
	raw, ok := record[d.o.TextField]
	if !ok {
		return nil, fmt.Errorf("the record has no field %q; Options.TextField names the one with the text", d.o.TextField)
	}
	var text *string
	if err := json.Unmarshal(raw, &text); err != nil {
		return nil, fmt.Errorf("field %q is not a string", d.o.TextField)
	}
	if text == nil {
		return nil, nil // null: no document
	}
	return []byte(*text), nil
}

// readBytes is the number of bytes of text that are read, and about the number tokenized, at a
// time.
const readBytes = 1 << 20

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

// checkText moves *checked over valid characters: to the end of text, or up to an incomplete
// character that later text may complete.
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
