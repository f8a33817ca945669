// Package tokens implements the command data.
package tokens

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/dustin/go-humanize/english"
	"github.com/spf13/cobra"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/data"
	"github.com/spillway-ml/spillway/data/token"
	"github.com/spillway-ml/spillway/plan"
)

// Command returns the command data, with tokenize and inspect below it.
func Command() *cobra.Command {
	cmd := &cobra.Command{Use: "data", Short: "Make token files and inspect them", Args: cli.NoArguments,
		RunE: func(*cobra.Command, []string) error { return errors.New("data: name what to do: tokenize or inspect") }}
	cmd.AddCommand(tokenizeCommand(), inspectCommand())
	return cmd
}

func tokenizeCommand() *cobra.Command {
	var tokenizer, out string
	var replace bool
	var o data.Options
	cmd := &cobra.Command{
		Use:   "tokenize PATH…",
		Short: "Write the tokens of text files, JSON lines and folders of them to a token file",
		Long: `Write the tokens of text and of JSON lines (*.jsonl with --text-field), also
compressed (*.gz, *.zst), and of folders of these, to a token file for train and
eval. The format is raw little-endian uint16, or llm.c's format of uint32 if the
tokenizer has more than 65,536 tokens. The tokenizer's end-of-text token separates
documents.

After an interruption the same command continues where it stopped.`,
		Example: "  spillway data tokenize --tokenizer gpt2 --out tokens.bin corpus",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return errors.New("data tokenize: name the files or folders whose text is to be tokenized")
			}
			return nil
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&tokenizer, "tokenizer", "", "bytes, gpt2, or a tokenizer.json `FILE`")
	fs.StringVar(&out, "out", "", "token `FILE` to write, named *.bin")
	fs.StringVar(&o.TextField, "text-field", "", "`NAME` of the field with the text in JSON lines")
	fs.StringVar(&o.Glob, "data-glob", "", "read only the files of a folder whose names match `PATTERN`")
	fs.BoolVar(&replace, "replace", false, "overwrite --out if it exists")
	fs.IntVar(&o.Threads, "threads", 0, "threads for tokenizing (default: all cores)")
	cmd.RunE = func(cmd *cobra.Command, paths []string) error {
		switch {
		case tokenizer == "":
			return errors.New("--tokenizer is missing: bytes, gpt2, or a tokenizer.json, the one of the model that is to be trained")
		case out == "":
			return errors.New("--out is missing: the token file to write, named *.bin")
		case !strings.HasSuffix(out, ".bin"):
			return fmt.Errorf("--out %q: a token file's name ends in .bin", out)
		case o.Threads < 0:
			return fmt.Errorf("--threads %d: at least 1 is needed; leave it out for all cores", o.Threads)
		}
		if st, err := os.Stat(out); err == nil && st.Size() > 0 && !replace {
			return fmt.Errorf("--out %q is there already; give another name, or --replace", out)
		}
		var err error
		if o.Tokenizer, err = token.Open(tokenizer); err != nil {
			return fmt.Errorf("--tokenizer: %w", err)
		}
		return tokenize(cmd.Context(), out, paths, o, cmd.OutOrStdout(), cmd.ErrOrStderr())
	}
	return cmd
}

func tokenize(ctx context.Context, out string, paths []string, o data.Options, stdout, stderr io.Writer) error {
	live, began, told := cli.NewLiveLine(stderr), time.Now(), time.Now()
	res, err := data.Tokenize(ctx, out, paths, o, func(p data.Progress) {
		fields := []string{fmt.Sprintf("%s tokens", humanize.Comma(p.Tokens)), fmt.Sprintf("file %d/%d %s", min(p.Files+1, p.OfFiles), p.OfFiles, cli.Gauge(p.Bytes, p.OfBytes)),
			fmt.Sprintf("%s of %s", plan.Bytes(p.Bytes), plan.Bytes(p.OfBytes)), fmt.Sprintf("%s/s", plan.Bytes(int64(float64(p.Bytes)/time.Since(began).Seconds())))}
		switch {
		case live != nil:
			live.Show(fields, p.Files == p.OfFiles)
		case time.Since(told) >= cli.TellWithin:
			told = time.Now()
			fmt.Fprintln(stderr, strings.Join(slices.Delete(fields, 1, 2), "  "))
		}
	})
	live.End()
	if errors.Is(err, context.Canceled) {
		return cli.Interrupted(fmt.Sprintf("interrupted after %s tokens; the same command goes on there", humanize.Comma(res.Tokens)))
	}
	if err != nil {
		return err
	}
	if res.LeftOut != "" {
		fmt.Fprintf(stderr, "left out: %s\n", cli.Flagged(res.LeftOut))
	}
	if err := warnOfEnd(out, o.Tokenizer, stderr); err != nil {
		return err
	}
	again := ""
	if res.Resumed {
		again = ", continued from an earlier run"
	}
	fmt.Fprintf(stdout, "%s: %s tokens of %d bytes each, of %s (tokenizer %s)%s\n", out, humanize.Comma(res.Tokens), res.TokenLen, english.Plural(res.Files, "file", ""), o.Tokenizer.Name(), again)
	return nil
}

// warnOfEnd warns of a token file in which the tokenizer's end token never occurs.
func warnOfEnd(path string, tok token.Tokenizer, stderr io.Writer) error {
	end := tok.EOT()
	if end < 0 {
		return nil
	}
	b, err := data.OpenTokenFile(path, 0)
	if err != nil {
		return err
	}
	found, err := b.Has(end)
	if err == nil && !found {
		fmt.Fprintf(stderr, "warning: %s: the end token %q (%d) never occurs, so a model does not learn to stop\n", path, tok.Decode([]int32{end}), end)
	}
	return errors.Join(err, b.Close())
}

func inspectCommand() *cobra.Command {
	var tokenizer string
	var first int
	cmd := &cobra.Command{
		Use:     "inspect FILE.bin",
		Short:   "Describe the contents of a token file",
		Example: "  spillway data inspect tokens.bin --tokenizer gpt2",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return fmt.Errorf("data inspect: name one token file; %d were given", len(args))
			}
			if filepath.Ext(args[0]) != ".bin" { // train also recognizes token files by it
				return fmt.Errorf(`data inspect: "%s" is not a token file, whose name ends in .bin; data tokenize makes one`, cli.Cut(args[0]))
			}
			return nil
		},
	}
	var jsonPath string
	cmd.Flags().StringVar(&tokenizer, "tokenizer", "", "bytes, gpt2, or a tokenizer.json `FILE`: also show the tokens' text")
	cmd.Flags().IntVar(&first, "tokens", 32, "number of first tokens to show")
	cmd.Flags().StringVar(&jsonPath, "json", "", "write the result as JSON to `FILE`, - for stdout")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		var tok token.Tokenizer
		var err error
		if tokenizer != "" {
			if tok, err = token.Open(tokenizer); err != nil {
				return fmt.Errorf("--tokenizer: %w", err)
			}
		}
		if first < 0 {
			return fmt.Errorf("--tokens %d: a number of tokens is not negative", first)
		}
		s, err := inspectTokens(cmd.Context(), args[0], first)
		if err != nil {
			return err
		}
		if jsonPath == "" {
			return s.print(cmd.OutOrStdout(), args[0], tok)
		}
		if jsonPath != "-" {
			if same, err := sameFile(jsonPath, args[0]); err != nil || same {
				return cmp.Or(err, fmt.Errorf("--json %s is the file that is inspected; write to another", jsonPath))
			}
		}
		return cli.WriteJSON(cmd.OutOrStdout(), jsonPath, s)
	}
	return cmd
}

func sameFile(a, b string) (bool, error) {
	x, err := os.Stat(a)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	y, err := os.Stat(b)
	return err == nil && os.SameFile(x, y), err
}

// TokenStats is the result of `data inspect`.
type TokenStats struct {
	Tokens   int64        `json:"tokens"`
	Bytes    int64        `json:"bytes"`
	Width    int64        `json:"bytes_a_token"`
	Header   bool         `json:"header"` // llm.c's
	Distinct int          `json:"distinct"`
	Largest  int32        `json:"largest"`
	Common   []tokenCount `json:"most_frequent"`
	First    []int32      `json:"first"`
}

type tokenCount struct {
	Token int32 `json:"token"`
	Count int64 `json:"count"`
}

// inspectTokens reads a complete token file.
func inspectTokens(ctx context.Context, path string, first int) (*TokenStats, error) {
	b, err := data.OpenTokenFile(path, 0)
	if err != nil {
		return nil, err
	}
	defer b.Close()
	st, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	s := &TokenStats{Tokens: b.Len(), Bytes: st.Size(), Width: b.TokenBytes(), First: make([]int32, min(int64(first), b.Len()))}
	s.Header = s.Bytes != s.Tokens*s.Width
	if err := b.Tokens(s.First, 0); err != nil {
		return nil, err
	}
	counts := map[int32]int64{}
	chunk := make([]int32, 1<<18)
	for at := int64(0); at < s.Tokens; {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		part := chunk[:min(int64(len(chunk)), s.Tokens-at)]
		if err := b.Tokens(part, at); err != nil {
			return nil, err
		}
		for _, t := range part {
			counts[t]++
			s.Largest = max(s.Largest, t)
		}
		at += int64(len(part))
	}
	s.Distinct = len(counts)
	for t, n := range counts {
		s.Common = append(s.Common, tokenCount{t, n})
	}
	slices.SortFunc(s.Common, func(a, b tokenCount) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), cmp.Compare(a.Token, b.Token))
	})
	s.Common = s.Common[:min(10, len(s.Common))]
	return s, nil
}

func (s *TokenStats) print(w io.Writer, path string, tok token.Tokenizer) error {
	form := fmt.Sprintf("raw, %d bytes a token", s.Width)
	if s.Header {
		form = fmt.Sprintf("llm.c's header, %d bytes a token", s.Width)
	}
	fmt.Fprintf(w, "%s: %s tokens, %s (%s)\n", path, humanize.Comma(s.Tokens), plan.Bytes(s.Bytes), form)
	cli.Wrap(w, "", "  ", fmt.Sprintf("%s different tokens, the largest is %d: a model needs a vocabulary of at least %d", humanize.Comma(int64(s.Distinct)), s.Largest, s.Largest+1))
	if tok != nil && int(s.Largest) >= tok.VocabSize() {
		return fmt.Errorf("data inspect: token %d is beyond tokenizer %s, which has %d: the file was made by another", s.Largest, tok.Name(), tok.VocabSize())
	}
	fmt.Fprintln(w, "most frequent:")
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, c := range s.Common {
		text := ""
		if tok != nil {
			text = fmt.Sprintf("\t%q", tok.Decode([]int32{c.Token}))
		}
		fmt.Fprintf(tw, "  %d\t%s\t%.1f %%%s\n", c.Token, humanize.Comma(c.Count), 100*float64(c.Count)/float64(s.Tokens), text)
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	if len(s.First) == 0 {
		return nil
	}
	cli.Wrap(w, "", "  ", "first: "+strings.Trim(fmt.Sprint(s.First), "[]"))
	if tok != nil {
		fmt.Fprintf(w, "  %q\n", tok.Decode(s.First))
	}
	return nil
}
