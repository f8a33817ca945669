package data

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/spillway-ml/spillway/data/token"
	"github.com/spillway-ml/spillway/internal/jinja"
)

// chat converts conversations to tokens. It may be used by several goroutines.
type chat struct {
	form     form
	mark     func(text string, marks []int) (tokens []int32, at []int) // see token.Marking
	template *jinja.Template
	vars     map[string]any // bos_token, eos_token, …
	all      bool           // every token counts in the loss, not only those of answers
}

// form is the set of fields in which a record holds a conversation.
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

// given says whether an object has a key whose value is not null.
func given(o map[string]json.RawMessage, key string) bool {
	return len(o[key]) > 0 && string(o[key]) != "null"
}

// Message is one message of a conversation.
type Message struct {
	Role    string `json:"role"` // user, assistant, system or another role that the template knows
	Content string `json:"content"`
}

// newChat prepares a template: a Jinja source, or "" for the tokenizer's own.
func newChat(tok token.Tokenizer, template string, all bool) (*chat, error) {
	mark, err := token.Marking(tok)
	if err != nil {
		return nil, err
	}
	s := token.SpecialsOf(tok)
	if template == "" {
		template = s.Template
	}
	if template == "" {
		return nil, errors.New("the model has no chat template (chat_template in tokenizer_config.json, or chat_template.jinja), which conversations need; give one as Config.Template")
	}
	t, err := jinja.Compile(template)
	if err != nil {
		return nil, err
	}
	vars := map[string]any{"tools": nil}
	for key, text := range s.Names {
		vars[key] = text
	}
	return &chat{mark: mark, template: t, vars: vars, all: all}, nil
}

// conversation holds a conversation's tokens and which of them count as targets.
type conversation struct {
	tokens  []int32
	counted []bool
	left    bool // the template left out answers that are not empty
}

// turn is a message of the data.
type turn struct {
	Message
	silent bool // weight 0: an answer that is not trained on
}

// encode converts a record to tokens.
func (c *chat) encode(record []byte) (out conversation, err error) {
	messages, said, vars, err := c.messages(record)
	if err == nil && !slices.ContainsFunc(said, turn.answers) {
		err = fmt.Errorf("the conversation has no answer: a message of role %s (its roles are %s; known are system, user, assistant and others that the template names); rename the role of its answers, or remove the record", answerRole, rolesOf(said))
	}
	if err != nil {
		return out, err
	}
	text, answers, err := c.spans(messages, said, vars)
	if err != nil {
		return out, err
	}
	var marks []int
	out.left = slices.ContainsFunc(said, turn.says)
	for _, s := range answers {
		if s.To > s.From {
			out.left = false
			_, last := utf8.DecodeLastRuneInString(text[s.From:s.To])
			marks = append(marks, s.From, s.To-last)
		}
	}
	var at []int
	out.tokens, at = c.mark(text, marks)
	out.counted = make([]bool, len(out.tokens))
	for i := 0; i < len(at); i += 2 {
		for k := at[i]; k <= at[i+1] && k < len(out.counted); k++ {
			out.counted[k] = true
		}
	}
	if c.all {
		for i := range out.counted {
			out.counted[i] = true
		}
	}
	return out, nil
}

// rolesOf lists the roles of messages, each once.
func rolesOf(said []turn) string {
	var roles []string
	for _, m := range said {
		if role := fmt.Sprintf("%.20q", m.Role); !slices.Contains(roles, role) {
			roles = append(roles, role)
		}
	}
	return strings.Join(roles[:min(len(roles), 5)], ", ")
}

// messages reads a record in the data's format. It returns the messages in the template's form, and
// as turns.
func (c *chat) messages(record []byte) (messages []any, said []turn, vars map[string]any, err error) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(record, &fields); err != nil {
		return nil, nil, nil, fmt.Errorf("the record is not a JSON object: %w; correct the line, or remove it", err)
	}
	if f := formOf(fields); f != c.form {
		return nil, nil, nil, fmt.Errorf("the record has no %v, which the first record has", c.form)
	}
	vars = c.vars
	list := fields["messages"]
	if c.form != messagesForm {
		if list, err = pair(fields, c.form); err != nil {
			return nil, nil, nil, err
		}
	} else if given(fields, "tools") {
		tools, err := jinja.FromJSON(fields["tools"])
		if err != nil {
			return nil, nil, nil, fmt.Errorf("tools: %w", err)
		}
		vars = map[string]any{"tools": tools}
		for k, v := range c.vars {
			if k != "tools" {
				vars[k] = v
			}
		}
	}
	var raw []json.RawMessage
	if json.Unmarshal(list, &raw) != nil {
		return nil, nil, nil, errors.New("messages is not a list")
	}
	for i, m := range raw {
		var known struct {
			Role    *string
			Content *json.RawMessage
			Weight  any
		}
		if json.Unmarshal(m, &known) != nil || known.Role == nil || *known.Role == "" {
			return nil, nil, nil, fmt.Errorf("message %d has no role; it must be an object with role and content", i+1)
		}
		if w := known.Weight; w != nil && w != 0.0 && w != 1.0 {
			return nil, nil, nil, fmt.Errorf("message %d: weight is %.40v; it must be 1, or 0 for an answer that is not trained on", i+1, w)
		}
		var content *string
		var calls struct {
			ToolCalls []json.RawMessage `json:"tool_calls"`
		}
		_ = json.Unmarshal(m, &calls) // calls that are not a list are ignored
		if known.Content != nil && json.Unmarshal(*known.Content, &content) != nil {
			return nil, nil, nil, fmt.Errorf("message %d: content is not a string", i+1)
		}
		if content == nil && len(calls.ToolCalls) == 0 {
			return nil, nil, nil, fmt.Errorf("message %d has no content", i+1)
		}
		v, err := jinja.FromJSON(m)
		if err != nil {
			return nil, nil, nil, fmt.Errorf("message %d: %w", i+1, err)
		}
		one := turn{Message: Message{Role: *known.Role}, silent: known.Weight == 0.0}
		if content != nil {
			one.Content = *content
		}
		messages, said = append(messages, v), append(said, one)
	}
	if len(messages) == 0 {
		return nil, nil, nil, errors.New("the conversation is empty: messages has none; remove the record")
	}
	return messages, said, vars, nil
}

// answerRole is the role of messages that the model is trained to write.
const answerRole = "assistant"

func (m Message) answers() bool { return m.Role == answerRole }

// says tells whether a message is an answer with text to train on.
func (m turn) says() bool { return m.answers() && !m.silent && strings.TrimSpace(m.Content) != "" }

// pair converts a record of prompt and answer fields to messages.
func pair(fields map[string]json.RawMessage, f form) (json.RawMessage, error) {
	text := func(name string) (s string, err error) {
		if given(fields, name) && json.Unmarshal(fields[name], &s) != nil {
			err = fmt.Errorf("field %q is not a string", name)
		}
		return s, err
	}
	names := []string{"prompt", "", "response"}
	if f == instructionForm {
		names = []string{"instruction", "input", "output"}
	}
	var parts [3]string
	for i, name := range names {
		var err error
		if parts[i], err = text(name); err != nil {
			return nil, err
		}
	}
	prompt := parts[0]
	if parts[1] != "" {
		prompt += "\n\n" + parts[1]
	}
	if strings.TrimSpace(prompt) == "" {
		return nil, fmt.Errorf("the conversation is empty: field %q holds nothing; fill it, or remove the record", names[0])
	}
	return json.Marshal([]Message{{"user", prompt}, {answerRole, parts[2]}})
}

// render renders messages as text. With prompt the text ends where the next answer begins.
func (c *chat) render(messages []any, vars map[string]any, prompt bool) (string, []jinja.Span, error) {
	all := map[string]any{"messages": jinja.List(messages), "add_generation_prompt": prompt}
	for k, v := range vars {
		all[k] = v
	}
	return c.template.Render(all)
}

// spans renders messages and finds the answers in the text. Answers are the template's {%
// generation %} blocks. Without these, an answer is the difference between two renderings: the text
// up to and including the answer, and the prompt before it.
func (c *chat) spans(messages []any, said []turn, vars map[string]any) (string, []jinja.Span, error) {
	render := func(n int, prompt bool) (string, []jinja.Span, error) { return c.render(messages[:n], vars, prompt) }
	text, answers, err := render(len(messages), false)
	if err != nil {
		return "", nil, err
	}
	if c.template.Marks || c.all {
		answers, err = c.trained(answers, said)
		return text, answers, err
	}
	for i, m := range said {
		if !m.answers() || m.silent {
			continue
		}
		if i == 0 {
			return "", nil, errors.New("the conversation begins with an answer, which has no prompt")
		}
		before, _, err := render(i, true)
		if err != nil {
			return "", nil, fmt.Errorf("before message %d: %w", i+1, err)
		}
		through := text
		if i+1 < len(messages) {
			if through, _, err = render(i+1, false); err != nil {
				return "", nil, fmt.Errorf("up to message %d: %w", i+1, err)
			}
		}
		if !strings.HasPrefix(text, through) || !strings.HasPrefix(through, before) {
			return "", nil, fmt.Errorf("the template changes earlier text where message %d is added, so the answers cannot be told apart; use one with {%% generation %%}, or Config.LossOn all", i+1)
		}
		answers = append(answers, jinja.Span{From: len(before), To: len(through)})
	}
	return text, answers, nil
}

// trained leaves out the {% generation %} blocks of answers with weight 0.
func (c *chat) trained(blocks []jinja.Span, said []turn) (list []jinja.Span, err error) {
	if !slices.ContainsFunc(said, func(m turn) bool { return m.answers() && m.silent }) {
		return blocks, nil
	}
	said = slices.DeleteFunc(slices.Clone(said), func(m turn) bool { return !m.answers() })
	switch {
	case c.all:
		return nil, errors.New("an answer has weight 0, and with Config.LossOn all every token counts; leave one out")
	case len(blocks) != len(said):
		return nil, fmt.Errorf("an answer has weight 0, and the template has %d {%% generation %%} blocks for "+
			"%d answers, so that none is known to be its; use one with a block for each answer", len(blocks), len(said))
	}
	for i, m := range said {
		if !m.silent {
			list = append(list, blocks[i])
		}
	}
	return list, nil
}
