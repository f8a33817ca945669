package infer

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/data"
	"github.com/spillway-ml/spillway/internal/crash"
	"github.com/spillway-ml/spillway/planner"
	trainer "github.com/spillway-ml/spillway/train"
)

// ChatCommand returns the command chat.
func ChatCommand() *cobra.Command {
	var c spillway.Config
	how := trainer.Decoding{}
	var system string
	cmd := &cobra.Command{
		Use:   "chat MODEL",
		Short: "Talk to a trained model",
		Long: `Talk to the model of a Hugging Face folder, of a checkpoint, or of a folder of
checkpoints. Each line of standard input is a message. The model answers it
through its chat template (or --template FILE). The answer is printed while it is
generated and ends at one of the model's end tokens. The conversation is kept
until the model's positions, or --seq, are full.

/new starts a new conversation; /quit or the end of standard input ends. Ctrl-C
ends an answer, or at the prompt the command, with status 130.`,
		Example: "  spillway chat run1 --temperature 0",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return fmt.Errorf("chat needs 1 argument, the model (got %d): a Hugging Face folder, a checkpoint, or a folder of checkpoints", len(args))
			}
			return nil
		},
	}
	fs := cmd.Flags()
	inferenceFlags(fs, &c)
	samplingFlags(fs, &how)
	templateFlag(fs, &c)
	fs.StringVar(&system, "system", "", "`TEXT` of a system message before the conversation")
	fs.IntVar(&how.Tokens, "tokens", 0, "maximum tokens of an answer (default: the positions that are left)")
	fs.IntVar(&c.Seq, "seq", 0, "maximum tokens of a conversation (default: the model's positions)")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c.Model = args[0]
		switch {
		case fs.Changed("tokens") && how.Tokens < 1:
			return fmt.Errorf("--tokens %d: at least 1 is needed", how.Tokens)
		case fs.Changed("seq") && c.Seq < 1:
			return fmt.Errorf("--seq %d: at least 1 token is needed; leave it out for the model's positions", c.Seq)
		}
		if err := refuseSampling(fs, &how); err != nil {
			return err
		}
		return chat(cmd.Context(), c, how, system, cmd.InOrStdin(), cmd.OutOrStdout(), cmd.ErrOrStderr())
	}
	return cmd
}

// conversation is the state of a running chat.
type conversation struct {
	t        *spillway.Trainer
	dialog   *data.Dialog
	how      trainer.Decoding
	most     int // tokens
	turn     uint64
	start    []data.Message // the first messages of each conversation
	said     []data.Message
	lines    <-chan string // of standard input
	failed   error         // of reading lines; valid once they are closed
	stdout   io.Writer
	stderr   io.Writer
	terminal bool // a person types
}

func chat(ctx context.Context, c spillway.Config, how trainer.Decoding, system string, stdin io.Reader, stdout, stderr io.Writer) (err error) {
	c.Warn = func(text string) { fmt.Fprintln(stderr, "warning:", cli.Flagged(text)) }
	var prompts *trainer.Prompts
	t, closeAll, err := newInference(ctx, &c, stderr, func(c *spillway.Config, m *planner.Model) (err error) {
		if prompts, err = trainer.OpenPrompts(*c, m, true); err != nil {
			return err
		}
		if c.Seq == 0 {
			c.Seq = prompts.Positions
		}
		c.Tokenizer, c.Generate, c.Batch, c.Steps = prompts.Name, true, 1, 1
		return nil
	})
	if errors.Is(err, context.Canceled) {
		return cli.Interrupted("interrupted before the first question")
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeAll()) }()
	for _, note := range cli.FlaggedAll(t.Notes()) {
		fmt.Fprintln(stderr, note)
	}
	s := &conversation{t: t, dialog: prompts.Dialog, how: how, most: c.Seq, stdout: stdout, stderr: stderr, terminal: cli.ReadsTerminal(stdin)}
	if system != "" {
		s.start = []data.Message{{Role: "system", Content: system}}
	}
	s.said = s.start
	if s.terminal {
		fmt.Fprintln(stderr, "/new starts a new conversation, /quit ends; Ctrl-C ends an answer")
	}
	s.lines = linesOf(stdin, &s.failed)
	return s.run(ctx)
}

// maxQuestion is the longest line of standard input, in bytes.
const maxQuestion = 16 << 20

// linesOf reads each line when it is received from the channel. It sets failed before closing it.
func linesOf(r io.Reader, failed *error) <-chan string {
	lines := make(chan string)
	go func() {
		defer crash.Guard()
		defer close(lines)
		in := bufio.NewScanner(r)
		in.Buffer(nil, maxQuestion)
		for in.Scan() {
			lines <- in.Text()
		}
		*failed = in.Err()
	}()
	return lines
}

// run reads and answers messages until there are no more lines.
func (s *conversation) run(ctx context.Context) error {
	for {
		if s.terminal {
			fmt.Fprint(s.stderr, "> ")
		}
		var line string
		more := false
		select {
		case <-ctx.Done():
		case line, more = <-s.lines:
		}
		switch text := strings.TrimSpace(line); {
		case ctx.Err() != nil:
			if s.terminal {
				fmt.Fprintln(s.stderr)
			}
			return &cli.SilentError{Err: ctx.Err()}
		case !more && s.failed != nil:
			return fmt.Errorf("standard input: %w", s.failed)
		case !more:
			if s.terminal {
				fmt.Fprintln(s.stderr)
			}
			return nil
		case text == "/quit":
			return nil
		case text == "/new":
			s.said = s.start
		case strings.HasPrefix(text, "/") && s.terminal && !strings.ContainsAny(text, " \t"):
			fmt.Fprintf(s.stderr, "%s is no command; /new and /quit are\n", cli.Cut(text))
		case text != "":
			if err := s.answer(ctx, line); err != nil {
				return err
			}
		}
	}
}

// errFull returns the error for a conversation without room for an answer.
func (s *conversation) errFull(tokens int) error {
	return fmt.Errorf("the conversation is full: with this message it has %d tokens, which leave no room for an answer within %d positions; /new starts a new one", tokens, s.most)
}

// answer answers a message. SIGINT ends the answer; the conversation keeps the part that was
// printed.
func (s *conversation) answer(ctx context.Context, message string) error {
	said := append(s.said[:len(s.said):len(s.said)], data.Message{Role: "user", Content: strings.ToValidUTF8(message, "\uFFFD")})
	prompt, err := s.dialog.Prompt(said)
	if err != nil {
		return err
	}
	if len(prompt) >= s.most {
		err := s.errFull(len(prompt))
		if s.terminal {
			fmt.Fprintln(s.stderr, err)
			return nil
		}
		return err
	}
	how := s.how
	if left := s.most - len(prompt); how.Tokens == 0 || how.Tokens > left {
		how.Tokens = left
	}
	how.Seed += s.turn
	s.turn++

	stoppable, stop := context.WithCancel(ctx)
	defer stop()
	defer cli.OnInterrupt(func() bool { stop(); return true })()
	clean := printable(s.stdout)
	var text strings.Builder
	var end trainer.End
	_, err = s.t.Decode(stoppable, [][]int32{prompt}, how, func(_ int, more string) error {
		text.WriteString(more)
		_, err := io.WriteString(s.stdout, clean(more))
		return err
	}, func(_ int, c trainer.Continuation) error {
		end = c.End
		return nil
	})
	fmt.Fprintln(s.stdout)
	switch {
	case ctx.Err() != nil:
		return &cli.SilentError{Err: ctx.Err()}
	case err != nil && stoppable.Err() == nil:
		return cli.Fault(err)
	case err != nil && text.Len() == 0:
		return nil // forget the message
	}
	s.said = append(said, data.Message{Role: "assistant", Content: text.String()})
	if end == trainer.EndLength && len(prompt)+how.Tokens >= s.most {
		fmt.Fprintf(s.stderr, "the answer ends here: the conversation fills its %d positions; /new starts a new one\n", s.most)
	}
	return nil
}
