package train

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/data/token"
)

// chatRun returns a run that trains a small model with 257 tokens on byte-tokenized conversations.
func chatRun(t *testing.T, lines int) request {
	c := keeping(t, 3)
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "config.json"), []byte(`{"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 257, "max_position_embeddings": 64, "initializer_range": 0.1}`), 0o644))
	c.Model, c.Init, c.Tokenizer, c.Order, c.Seq = dir, "random", "bytes", "", 40
	var text strings.Builder
	for i := range lines {
		fmt.Fprintf(&text, `{"prompt": "%d?", "response": "%d"}`+"\n", i, i)
	}
	c.Data = filepath.Join(t.TempDir(), "chat.jsonl")
	require.NoError(t, os.WriteFile(c.Data, []byte(text.String()), 0o644))
	return c
}

// TestTrainsOnConversations trains on conversations in shuffled order and resumes. The notes must
// count the conversations, and the checkpoint must hold an end token and a chat template.
func TestTrainsOnConversations(t *testing.T) {
	t.Parallel()
	c := chatRun(t, 50)
	c.EvalSplit, c.EvalSteps = 0.2, 1
	notes := strings.Join(ended(t, c), "\n")
	require.Regexp(t, `Config.Data \S+: \d+ of 50 conversations, 0 cut to 40 tokens, 0 dropped without room for an answer: [\d,]+ tokens, [\d,]+ targets in \d+ packed rows of 40`, notes)
	require.Regexp(t, `held out: \d+ of 50 conversations`, notes)
	saved := newestOf(t, c.Checkpoint).Folder
	text, err := os.ReadFile(filepath.Join(c.Checkpoint, filepath.Base(saved), "tokenizer_config.json"))
	require.NoError(t, err)
	require.Contains(t, string(text), "endoftext")
	require.Contains(t, string(text), "chat_template")

	c.Steps, c.Resume = 5, true
	require.NotContains(t, strings.Join(ended(t, c), "\n"), "changed since")
	other := c
	other.Steps, other.LossOn = 7, "all"
	refused(t, other, "Config.Data is other data")
}

// TestTemplateGoesWithTheCheckpoint checks that a checkpoint stores the run's chat template instead
// of the model's.
func TestTemplateGoesWithTheCheckpoint(t *testing.T) {
	t.Parallel()
	c := chatRun(t, 10)
	c.Template = filepath.Join(t.TempDir(), "own.jinja")
	text := `{% for m in messages %}[{{ m.role }}] {{ m.content }}{% if m.role == "assistant" %}{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}`
	require.NoError(t, os.WriteFile(c.Template, []byte(text), 0o644))
	ended(t, c)
	saved := filepath.Join(c.Checkpoint, filepath.Base(newestOf(t, c.Checkpoint).Folder))
	tok, err := token.Open(filepath.Join(saved, "tokenizer.json"))
	require.NoError(t, err)
	require.Equal(t, text, token.SpecialsOf(tok).Template)
	require.NoError(t, os.Remove(c.Template))
	c.Model, c.Init, c.Tokenizer, c.Template, c.Checkpoint = saved, saved, "", "", ""
	c.EvalData, c.Data, c.Inference = c.Data, "", true
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	defer func() { require.NoError(t, tr.Close()) }()
	ev, err := tr.Evaluate(context.Background())
	require.NoError(t, err)
	require.Positive(t, ev.Targets)
}

// TestConversationSettingsRefused checks that conversation settings with unsuitable data or values
// are refused, and that the error names the setting.
func TestConversationSettingsRefused(t *testing.T) {
	t.Parallel()
	c := chatRun(t, 3)
	c.Data, c.Long = "../testdata/text.txt", "drop"
	refused(t, c, "Config.Long with Config.Data", "holds no conversations")
	c = chatRun(t, 3)
	c.LossOn = "prompts"
	refused(t, c, "Config.LossOn", "answers, all")
	c = chatRun(t, 3)
	c.EvalSplit, c.EvalData = 0.5, c.Data
	refused(t, c, "Config.EvalSplit with Config.EvalData")
	c = chatRun(t, 3)
	c.Model, c.Init = "../testdata/llama-tied", "../testdata/llama-tied"
	refused(t, c, "no end token for conversations in bytes")
	c = chatRun(t, 3)
	c.Template = filepath.Join(t.TempDir(), "none")
	refused(t, c, "Config.Template")
}

// TestEvaluationCountsOnce evaluates with more batches than the held-out data fill. Each target
// must count once, as in an inference run, at any number of ranks.
func TestEvaluationCountsOnce(t *testing.T) {
	t.Parallel()
	evaluate := func(c request) EvalResult {
		tr, err := c.start(context.Background())
		require.NoError(t, err)
		defer func() { require.NoError(t, tr.Close()) }()
		if !c.Inference {
			require.NoError(t, tr.Run(context.Background(), nil))
		}
		held, err := tr.Evaluate(context.Background())
		require.NoError(t, err)
		return held
	}
	chat := chatRun(t, 20)
	text := chat
	text.Data, text.Model, text.Seq = "../testdata/text.txt", chat.Model, 60
	for name, c := range map[string]request{"conversations": chat, "text": text} {
		c.EvalData, c.EvalSteps, c.Steps, c.LR, c.Batch, c.Checkpoint = c.Data, 100, 1, 0, 3, scratch(t)
		want := evaluate(c)
		of := c
		of.Model = newestOf(t, c.Checkpoint).Folder
		of.Init, of.Data, of.Tokenizer, of.Checkpoint, of.Inference = of.Model, "", "", "", true
		alone := evaluate(of)
		require.Equal(t, alone.Targets, want.Targets, name)
		require.InEpsilon(t, alone.Loss, want.Loss, 1e-6, name)
		c.Checkpoint, c.Ranks = "", 2
		for _, reproducible := range []bool{false, true} {
			c.Reproducible = reproducible
			got := evaluate(c)
			require.Equal(t, want.Targets, got.Targets, name)
			require.InEpsilon(t, want.Loss, got.Loss, 1e-6, name)
		}
	}
}
