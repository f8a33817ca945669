package data

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/parquet-go/parquet-go"
	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/data/token"
	"github.com/spillway-ml/spillway/internal/jinja"
	"github.com/spillway-ml/spillway/internal/testkit/long"
)

// TestMasksAgreeWithPython compares tokens and masks with a Python implementation of TRL's rules.
func TestMasksAgreeWithPython(t *testing.T) {
	golden, err := os.ReadFile("testdata/masks.jsonl")
	require.NoError(t, err)
	masksAgree(t, golden, 20)
}

func TestMasksAgreeWithPythonNow(t *testing.T) {
	long.Only(t)
	seed := fmt.Sprint(os.Getpid())
	t.Log("seed", seed)
	out, err := exec.Command("python3", "../internal/jinja/testdata/reference.py", "masks", seed, "500").Output()
	require.NoError(t, err)
	masksAgree(t, out, 3000)
}

// masksAgree compares the encoded conversations with golden, and requires at least the given number
// of masks.
func masksAgree(t *testing.T, golden []byte, least int) {
	chats := map[string]*chat{}
	lines, masked := bufio.NewScanner(bytes.NewReader(golden)), 0
	lines.Buffer(nil, 1<<24)
	for lines.Scan() {
		var c struct {
			Template, Raises string
			Messages         json.RawMessage
			Tokens           []int32
			Mask             *string
		}
		require.NoError(t, json.Unmarshal(lines.Bytes(), &c))
		if chats[c.Template] == nil {
			chats[c.Template] = chatOf(t, c.Template)
		}
		got, err := chats[c.Template].encode(marshal(t, map[string]any{"messages": c.Messages}))
		if c.Mask == nil {
			require.Error(t, err, "%s %s", c.Template, c.Messages)
			continue
		}
		require.NoError(t, err, "%s %s", c.Template, c.Messages)
		require.Equal(t, c.Tokens, got.tokens)
		var mask strings.Builder
		for _, counted := range got.counted {
			mask.WriteByte("01"[map[bool]int{true: 1}[counted]])
		}
		require.Equal(t, *c.Mask, mask.String(), "%s %s", c.Template, c.Messages)
		masked++
	}
	require.NoError(t, lines.Err())
	require.GreaterOrEqual(t, masked, least)
}

// chatOf returns a chat with a template of package jinja's tests, configured like reference.py.
func chatOf(t *testing.T, template string) *chat {
	source, err := os.ReadFile("../internal/jinja/testdata/templates/" + template + ".jinja")
	require.NoError(t, err)
	compiled, err := jinja.Compile(string(source))
	require.NoError(t, err)
	tok, err := token.Parse("bytes", bytesAnd(t, "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<think>"), nil)
	require.NoError(t, err)
	mark, err := token.Marking(tok)
	require.NoError(t, err)
	return &chat{form: messagesForm, mark: mark, template: compiled, vars: map[string]any{"tools": nil, "bos_token": "<s>", "eos_token": "</s>"}}
}

// bytesAnd returns a tokenizer.json of the 256 bytes, whose ids are their values, and special
// tokens.
func bytesAnd(t testing.TB, special ...string) []byte {
	text, err := token.HuggingFace(token.Bytes())
	require.NoError(t, err)
	var file map[string]any
	require.NoError(t, json.Unmarshal(text, &file))
	var added []any
	for i, s := range special {
		added = append(added, map[string]any{"id": 256 + i, "content": s, "special": true})
	}
	file["added_tokens"] = added
	return marshal(t, file)
}

func openChat(t *testing.T, path string, change func(*ChatOptions)) (*Conversations, error) {
	c := ChatOptions{Seq: 40, Vocab: 300}
	if change != nil {
		change(&c)
	}
	out, err := OpenConversations(context.Background(), path, Options{Tokenizer: token.ByteChat()}, c)
	if err == nil {
		t.Cleanup(func() { require.NoError(t, out.Close()) })
	}
	return out, err
}

func row(t *testing.T, c *Conversations, i int64) (string, string) {
	r := &Row{Tokens: make([]int32, c.o.Seq), Targets: make([]int32, c.o.Seq)}
	for k := range r.Targets {
		r.Targets[k] = -1
	}
	require.NoError(t, c.Sample(i, r))
	targets := make([]int32, 0)
	for _, v := range r.Targets {
		if v >= 0 {
			targets = append(targets, v)
		}
	}
	require.Len(t, targets, c.CountTargets(i))
	return strings.TrimRight(token.ByteChat().Decode(r.Tokens), "\x00"), token.ByteChat().Decode(targets)
}

// TestConversationForms checks that each record form, from JSON lines and Parquet, gives the
// documented text and targets.
func TestConversationForms(t *testing.T) {
	type message struct{ Role, Content string }
	type byMessages struct {
		Messages []struct {
			Role    string `parquet:"role"`
			Content string `parquet:"content"`
		} `parquet:"messages,list"`
	}
	table := byMessages{}
	for _, m := range []message{{"user", "hi"}, {"assistant", "yo"}} {
		table.Messages = append(table.Messages, struct {
			Role    string `parquet:"role"`
			Content string `parquet:"content"`
		}{m.Role, m.Content})
	}
	inParquet := t.TempDir() + "/a.parquet"
	require.NoError(t, parquet.WriteFile(inParquet, []byMessages{table}))
	for name, path := range map[string]string{
		"messages":    put(t, "a.jsonl", []byte(`{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}`)),
		"prompt":      put(t, "a.jsonl", []byte(`{"prompt": "hi", "response": "yo"}`+"\n\n")),
		"instruction": put(t, "a.jsonl", []byte(`{"instruction": "hi", "input": "", "output": "yo"}`)),
		"parquet":     inParquet,
	} {
		is, err := IsConversations(path, Options{})
		require.NoError(t, err)
		require.True(t, is, name)
		c, err := openChat(t, path, nil)
		require.NoError(t, err, name)
		text, targets := row(t, c, 0)
		require.Equal(t, "<|user|>hi<|assistant|>yo<|endoftext|>", text, name)
		require.Equal(t, "yo<|endoftext|>", targets, name)
	}
	is, err := IsConversations(put(t, "b.jsonl", []byte(`{"text": "a"}`)), Options{})
	require.NoError(t, err)
	require.False(t, is)
	_, err = Open(context.Background(), put(t, "b.jsonl", []byte(`{"body": "a", "id": 3}`)), Options{})
	require.ErrorContains(t, err, "records with the fields body, id: name the field")
}

// TestConversationErrors checks that the error for a malformed or empty record names its line.
// Conversations without room for an answer are counted and dropped.
func TestConversationErrors(t *testing.T) {
	good := `{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}` + "\n"
	for bad, want := range map[string]string{
		`{"messages": []}`: "the conversation is empty",
		`{"messages": [{"role": "user", "content": "q"}]}`: "no answer",
		`{"messages": [{"content": "q"}]}`:                 "message 1 has no role",
		`{"messages": [{"role": "user"}]}`:                 "message 1 has no content",
		`{"messages": [{"role": "user", "content": 3}]}`:   "message 1: content is not a string",
		`{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 0.5}]}`: "message 2: weight is 0.5; it must be 1, or 0",
		`{"messages": "x"}`:                                     "messages is not a list",
		`{"prompt": "q", "response": "a"}`:                      "no messages, which the first record has",
		`{"messages": [{"role": "assistant", "content": "q"}]}`: "begins with an answer",
		`not json`: "not a JSON object",
	} {
		path := put(t, "a.jsonl", []byte(good+bad+"\n"))
		_, err := openChat(t, path, nil)
		require.ErrorContains(t, err, path+":2: ", bad)
		require.ErrorContains(t, err, want)
	}
	_, err := openChat(t, put(t, "a.jsonl", []byte(`{"prompt": " ", "response": "a"}`)), nil)
	require.ErrorContains(t, err, "a.jsonl:1: the conversation is empty")
	_, err = OpenConversations(context.Background(), put(t, "a.jsonl", []byte(good)), Options{Tokenizer: token.GPT2()}, ChatOptions{Seq: 10, Vocab: 50257})
	require.ErrorContains(t, err, "no chat template")

	long := put(t, "a.jsonl", []byte(`{"prompt": "`+strings.Repeat("q", 40)+`", "response": "a"}`+"\n"+`{"prompt": "q", "response": "`+strings.Repeat("a", 40)+`"}`+"\n"+`{"prompt": "q", "response": "a"}`))
	c, err := openChat(t, long, nil)
	require.NoError(t, err)
	require.Contains(t, c.Summary(), "3 conversations, 2 cut to 40 tokens, 1 dropped without room for an answer: 64 tokens, 20 targets in 2 rows of 40 (80 % full)")
	c, err = openChat(t, long, func(o *ChatOptions) { o.Drop = true })
	require.NoError(t, err)
	require.Contains(t, c.Summary(), "2 dropped that are over 40 tokens")
	require.EqualValues(t, 1, c.Len())
	_, err = openChat(t, long, func(o *ChatOptions) { o.Seq = 4 })
	require.ErrorContains(t, err, "no conversation is left")
	require.ErrorContains(t, err, "give Config.Seq above 4,")
	_, err = openChat(t, put(t, "a.jsonl", nil), nil)
	require.ErrorContains(t, err, "a.jsonl holds no record: it is empty")
	_, err = openChat(t, put(t, "a.jsonl", []byte(`{"messages": [{"role": "user", "content": "q"}, {"role": "bot", "content": "a"}]}`)), nil)
	require.ErrorContains(t, err, `a message of role assistant (its roles are "user", "bot"; known are system, user, assistant and others that the template names)`)
}

// TestWeights checks that an answer of weight 0 is part of the text but not of the targets.
func TestWeights(t *testing.T) {
	const marked = `{% for m in messages %}{% if m.role == "user" %}<|user|>{{ m.content }}{% else %}<|assistant|>{% generation %}{{ m.content }}<|endoftext|>{% endgeneration %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}`
	path := put(t, "a.jsonl", []byte(`{"messages": [{"role": "user", "content": "q", "weight": 0}, {"role": "assistant", "content": "no", "weight": 0}, {"role": "user", "content": "r"}, {"role": "assistant", "content": "yes", "weight": 1}]}`))
	for _, template := range []string{"", marked} {
		c, err := openChat(t, path, func(o *ChatOptions) { o.Template, o.Seq = template, 120 })
		require.NoError(t, err)
		text, targets := row(t, c, 0)
		require.Equal(t, "<|user|>q<|assistant|>no<|endoftext|><|user|>r<|assistant|>yes<|endoftext|>", text)
		require.Equal(t, "yes<|endoftext|>", targets)
	}
	_, err := openChat(t, path, func(o *ChatOptions) { o.All = true })
	require.ErrorContains(t, err, "a.jsonl:1: an answer has weight 0, and with Config.LossOn all every token counts")
	_, err = openChat(t, path, func(o *ChatOptions) { o.Template = "{% generation %}{{ messages }}{% endgeneration %}" })
	require.ErrorContains(t, err, "the template has 1 {% generation %} blocks for 2 answers")
}

// TestTemplateWithoutAnswers checks that answers omitted by the template and empty answers give
// different errors.
func TestTemplateWithoutAnswers(t *testing.T) {
	const users = `{% for m in messages if m.role == "user" %}{{ m.content }}{% endfor %}`
	for answer, want := range map[string]string{"a": "the chat template leaves out their answers, the messages of role assistant; give one with them as Config.Template", "": "give conversations with answers that are not empty"} {
		_, err := openChat(t, put(t, "a.jsonl", []byte(`{"prompt": "q", "response": "`+answer+`"}`)), func(o *ChatOptions) { o.Template = users })
		require.ErrorContains(t, err, want)
	}
}

// TestByteOrderMark checks that a byte order mark before the first record is ignored.
func TestByteOrderMark(t *testing.T) {
	const records = `{"prompt": "q", "response": "a", "text": "t"}` + "\n" + `{"prompt": "r", "response": "b", "text": "u"}`
	path := put(t, "a.jsonl", []byte("\uFEFF"+records))
	is, err := IsConversations(path, Options{})
	require.NoError(t, err)
	require.True(t, is)
	marked, err := openChat(t, path, nil)
	require.NoError(t, err)
	plain, err := openChat(t, put(t, "b.jsonl", []byte(records)), nil)
	require.NoError(t, err)
	require.Equal(t, plain.Fingerprint(), marked.Fingerprint())
	text, err := OpenText(context.Background(), path, Options{TextField: "text"})
	require.NoError(t, err)
	require.EqualValues(t, 2, text.Len())
}

// TestEvalSplit checks that the training and held-out conversations are disjoint and complete, and
// that the split depends on the seed.
func TestEvalSplit(t *testing.T) {
	var text strings.Builder
	for i := range 400 {
		fmt.Fprintf(&text, `{"prompt": "%d", "response": "a"}`+"\n", i)
	}
	path := put(t, "a.jsonl", []byte(text.String()))
	rows := func(seed int64, held bool) map[string]bool {
		c, err := openChat(t, path, func(o *ChatOptions) { o.Split = Split{Seed: seed, Share: 0.1, Held: held} })
		require.NoError(t, err)
		seen := map[string]bool{}
		for i := range c.Len() {
			text, _ := row(t, c, i)
			seen[text] = true
		}
		return seen
	}
	train, held := rows(1, false), rows(1, true)
	require.Len(t, train, 400-len(held))
	require.InDelta(t, 40, len(held), 20)
	for text := range held {
		require.False(t, train[text])
	}
	require.NotEqual(t, held, rows(2, true))
}
