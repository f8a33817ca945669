package infer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"time"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/data"
	"github.com/spillway-ml/spillway/planner"
	trainer "github.com/spillway-ml/spillway/train"
)

// accuracy counts the answers that equal those of the data.
type accuracy struct {
	wanted bool
	how    trainer.Decoding
	pairs  []data.Question
}

// prepare reads the pairs of prompt and answer and derives the row length.
func (a *accuracy) prepare(c *spillway.Config, m *planner.Model) error {
	p, err := trainer.OpenPrompts(*c, m, true)
	if err != nil {
		return err
	}
	if a.pairs, err = data.ReadQuestions(c.EvalData, p.Tokenizer, p.Dialog); err != nil {
		return fmt.Errorf("--accuracy: --data: %w", err)
	}
	longest, answer := a.pairs[0], 0
	for _, q := range a.pairs {
		if !q.Answered {
			return fmt.Errorf("--accuracy: --data: %s has no answer to compare with; prompt and response, instruction and output, or messages of role assistant are needed", q.Place)
		}
		if len(q.Prompt) > len(longest.Prompt) {
			longest = q
		}
		answer = max(answer, len(p.Tokenizer.Encode(q.Answer)))
	}
	clipped := a.how.Tokens == 0
	if clipped {
		a.how.Tokens = 2*answer + 16
	}
	least := len(longest.Prompt) + 1
	if !clipped {
		least += a.how.Tokens - 1
	}
	fits := least <= p.Positions // otherwise no other --seq helps
	if c.Seq > 0 && c.Seq < least && fits {
		return fmt.Errorf("--accuracy: %s: its prompt has %d tokens, and with the answer it takes at least %d, "+
			"above --seq %d; give --seq %d, or leave it out (the model has %d positions)",
			longest.Place, len(longest.Prompt), least, c.Seq, min(len(longest.Prompt)+a.how.Tokens, p.Positions), p.Positions)
	}
	most := p.Positions
	if c.Seq > 0 && fits {
		most = min(most, c.Seq)
	}
	if a.how.Tokens, err = room(most, longest, a.how.Tokens, clipped); err != nil {
		return fmt.Errorf("--accuracy: %w", err)
	}
	if c.Seq == 0 {
		if c.Seq, err = seqOf(m, p.Positions); err != nil {
			return err
		}
		c.Seq = max(c.Seq, len(longest.Prompt)+a.how.Tokens)
	}
	c.Tokenizer, c.Generate = p.Name, true
	return nil
}

// Accuracy is the share of the answers that equal those of the data.
type Accuracy struct {
	Correct int        `json:"correct"`
	Pairs   int        `json:"pairs"`
	Share   float64    `json:"accuracy"`
	Between [2]float64 `json:"accuracy_interval"` // 95 %
	Ended   int        `json:"ended"`             // answers that end at an end token
	Answers []Compared `json:"answers"`
}

// Compared is an answer and the expected one of the data.
type Compared struct {
	Prompt   string      `json:"prompt"` // the last message
	Answer   string      `json:"answer"`
	Expected string      `json:"expected"`
	Correct  bool        `json:"correct"`
	End      trainer.End `json:"end"` // end: an end token; stop: --stop; length: --tokens
}

func (a *Accuracy) String() string {
	return fmt.Sprintf("accuracy %.1f %% (%d of %d answers; 95 %% interval %.1f to %.1f %%); "+
		"%d of them end at an end token",
		100*a.Share, a.Correct, a.Pairs, 100*a.Between[0], 100*a.Between[1], a.Ended)
}

// wilson returns the 95 % confidence interval of a share of n (Wilson 1927).
func wilson(correct, n int) [2]float64 {
	const z = 1.959963984540054
	p, m := float64(correct)/float64(n), float64(n)
	middle, half := p+z*z/(2*m), z*math.Sqrt(p*(1-p)/m+z*z/(4*m*m))
	return [2]float64{max(0, (middle-half)/(1+z*z/m)), min(1, (middle+half)/(1+z*z/m))}
}

// measure answers the prompts of the pairs; it returns nil if that is not requested.
func (a *accuracy) measure(ctx context.Context, t *spillway.Trainer, stderr io.Writer) (*Accuracy, error) {
	if !a.wanted {
		return nil, nil
	}
	prompts := make([][]int32, len(a.pairs))
	for i := range prompts {
		prompts[i] = a.pairs[i].Prompt
	}
	r := &Accuracy{Pairs: len(prompts), Answers: make([]Compared, len(prompts))}
	live, told, ended := cli.NewLiveLine(stderr), time.Now(), 0
	_, err := t.Decode(ctx, prompts, a.how, nil, func(i int, c trainer.Continuation) error {
		q := a.pairs[i]
		one := Compared{q.Text, c.Text, q.Answer, strings.TrimSpace(c.Text) == strings.TrimSpace(q.Answer), c.End}
		r.Answers[i] = one
		if one.Correct {
			r.Correct++
		}
		if c.End == trainer.EndToken {
			r.Ended++
		}
		ended++
		switch {
		case live != nil:
			live.Show([]string{fmt.Sprintf("answer %d/%d %s", ended, len(prompts), cli.Gauge(int64(ended), int64(len(prompts)))), fmt.Sprintf("%d correct", r.Correct)}, ended == len(prompts))
		case time.Since(told) >= cli.TellWithin:
			told = time.Now()
			fmt.Fprintf(stderr, "answer %d/%d  %d correct\n", ended, len(prompts), r.Correct)
		}
		return nil
	})
	live.End()
	switch {
	case errors.Is(err, context.Canceled):
		return nil, cli.Interrupted(fmt.Sprintf("interrupted after %d of %d answers", ended, len(prompts)))
	case err != nil:
		return nil, cli.Fault(err)
	}
	r.Share, r.Between = float64(r.Correct)/float64(r.Pairs), wilson(r.Correct, r.Pairs)
	return r, nil
}
