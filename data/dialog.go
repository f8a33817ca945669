package data

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spillway-ml/spillway/data/token"
	"github.com/spillway-ml/spillway/internal/jinja"
)

// Dialog converts conversations to prompts. It may be used by several goroutines.
type Dialog struct{ c *chat }

// NewDialog prepares a chat template: a Jinja source, or "" for the tokenizer's own.
func NewDialog(tok token.Tokenizer, template string) (*Dialog, error) {
	c, err := newChat(tok, template, false)
	if err != nil {
		return nil, err
	}
	return &Dialog{c}, nil
}

// Prompt returns the tokens of messages up to the beginning of the next answer.
func (d *Dialog) Prompt(messages []Message) ([]int32, error) {
	var list []any
	for _, m := range messages {
		text, err := json.Marshal(m)
		if err != nil {
			return nil, err
		}
		v, err := jinja.FromJSON(text)
		if err != nil {
			return nil, err
		}
		list = append(list, v)
	}
	return d.prompt(list, d.c.vars)
}

func (d *Dialog) prompt(messages []any, vars map[string]any) ([]int32, error) {
	text, _, err := d.c.render(messages, vars, true)
	if err != nil {
		return nil, err
	}
	tokens, _ := d.c.mark(text, nil)
	return tokens, nil
}

// Question is a prompt read from a file.
type Question struct {
	Prompt []int32
	Text   string // the prompt; for a conversation, its last message
	// Answer is the reference answer in the file, if Answered.
	Answer   string
	Answered bool
	Place    string // in the file, for errors
}

// ReadQuestions reads prompts: one per line of text, or one per record of JSON lines and
// Parquet. A record is a conversation, whose last answer becomes the Answer, or has a field
// "prompt". With d, plain texts become user messages. Without d, the model continues the texts,
// and conversations are refused.
func ReadQuestions(path string, tok token.Tokenizer, d *Dialog) (list []Question, err error) {
	add := func(q Question, err error) error {
		if err == nil && len(q.Prompt) == 0 {
			err = errors.New("the prompt is empty")
		}
		if err != nil {
			return fmt.Errorf("read %s: %w", q.Place, err)
		}
		list = append(list, q)
		return nil
	}
	st, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if kindOf(path) == plainText && !st.IsDir() {
		err = eachLine(path, func(line int, text string) error {
			q, err := textQuestion(text, tok, d)
			q.Place = fmt.Sprintf("%s:%d", path, line)
			return add(q, err)
		})
	} else {
		err = eachRecord(path, func(place string, record []byte) error {
			q, err := recordQuestion(record, tok, d)
			q.Place = place
			return add(q, err)
		})
	}
	if err == nil && len(list) == 0 {
		err = fmt.Errorf("%s holds no prompt", path)
	}
	return list, err
}

func textQuestion(text string, tok token.Tokenizer, d *Dialog) (q Question, err error) {
	q.Text = text
	if d == nil {
		q.Prompt = token.Prompt(tok, text)
		return q, nil
	}
	q.Prompt, err = d.Prompt([]Message{{"user", text}})
	return q, err
}

// ErrNoTemplate is the error for a conversation that is read without a template.
var ErrNoTemplate = errors.New("the record is a conversation, which needs a chat template")

func recordQuestion(record []byte, tok token.Tokenizer, d *Dialog) (q Question, err error) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(record, &fields); err != nil {
		return q, fmt.Errorf("the record is not a JSON object: %w", err)
	}
	form := formOf(fields)
	if form == noForm {
		var text string
		if !given(fields, "prompt") || json.Unmarshal(fields["prompt"], &text) != nil {
			return q, errors.New("the record is no conversation, and has no text as its field prompt")
		}
		return textQuestion(text, tok, d)
	}
	if d == nil {
		return q, ErrNoTemplate
	}
	c := *d.c
	c.form = form
	messages, said, vars, err := c.messages(record)
	if err != nil {
		return q, err
	}
	n := len(said)
	for i := range said {
		if said[i].answers() {
			n, q.Answer, q.Answered = i, said[i].Content, true
		}
	}
	if n == 0 {
		return q, errors.New("the conversation begins with an answer, which has no prompt")
	}
	q.Text = said[n-1].Content
	q.Prompt, err = d.prompt(messages[:n], vars)
	return q, err
}

// eachRecord calls give with each record of JSON lines or Parquet files, or of a folder of
// these.
func eachRecord(path string, give func(place string, record []byte) error) error {
	o := Options{chat: &chat{}}
	c, err := listCorpus([]string{path}, o)
	if err != nil {
		return err
	}
	d := documents{c: c, o: o, give: func(p *piece) error {
		for _, part := range p.parts {
			if err := give(c.files[p.file].place(part.record), part.text); err != nil {
				return err
			}
		}
		return nil
	}}
	return d.run(position{})
}

// eachLine calls give with each non-empty line of a text.
func eachLine(path string, give func(line int, text string) error) error {
	c, err := listCorpus([]string{path}, Options{})
	if err != nil {
		return err
	}
	f, err := c.files[0].open()
	if err != nil {
		return err
	}
	defer f.Close()
	in := bufio.NewScanner(f)
	in.Buffer(nil, maxLine)
	for line := 1; in.Scan(); line++ {
		if text := strings.TrimSpace(in.Text()); text != "" {
			if err := give(line, strings.ToValidUTF8(text, "\uFFFD")); err != nil {
				return err
			}
		}
	}
	if err := in.Err(); err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	return nil
}
