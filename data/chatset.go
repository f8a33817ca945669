package data

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash"
)

// ChatOptions says how OpenConversations makes rows.
type ChatOptions struct {
	Template string // a Jinja source; "": the model's chat template
	All      bool   // every token is a target, not the answers' alone
	Seq      int    // tokens of a row
	Drop     bool   // leaves out conversations that are longer than a row; else they are cut
	Vocab    int    // of the model
	// Seed draws the held-out conversations, EvalShare of them. Held chooses these.
	Seed      int64
	EvalShare float64
	Held      bool
}

// Conversations is conversations as rows of tokens, one each. Their answers are the targets.
type Conversations struct {
	o       ChatOptions
	values  *builder // a token twice, and 1 where it is counted
	buffer  *Buffer
	hash    hash.Hash
	starts  []int64 // of each conversation's values, and the end
	targets []int32
	leftOut string

	read, held, long, empty int // conversations seen, of the other part, over Seq, without a target
	tokens, counted         int64
}

// OpenConversations reads conversations (see IsConversations) of JSON lines, Parquet files
// or a folder of them. A record that is no conversation is an error with its place. One
// whose prompt leaves no room for a target is dropped and counted (Summary).
func OpenConversations(ctx context.Context, root string, o Options, c ChatOptions) (*Conversations, error) {
	fail := func(err error) (*Conversations, error) { return nil, fmt.Errorf("open conversations: %w", err) }
	if c.Seq < 2 {
		return fail(fmt.Errorf("rows of %d tokens hold no answer; at least 2 are needed", c.Seq))
	}
	ch, err := newChat(o.Tokenizer, c.Template, c.All)
	if err != nil {
		return fail(err)
	}
	o.chat = ch
	files, err := listCorpus([]string{root}, o)
	if err != nil {
		return fail(err)
	}
	first, err := files.firstRecord()
	if err != nil {
		return fail(err)
	}
	if ch.form = formOf(first); ch.form == noForm {
		return fail(noText(root, first))
	}
	out := &Conversations{o: c, hash: sha256.New(), starts: []int64{0}, values: &builder{name: root, width: 4}}
	defer out.values.discard()
	if err := tokenize(ctx, files, o, out, position{}, nil); err != nil {
		return fail(err)
	}
	if len(out.targets) == 0 {
		return fail(fmt.Errorf("%s: no conversation is left: %s", root, out.Summary()))
	}
	if out.buffer, err = out.values.finish(); err != nil {
		return fail(err)
	}
	out.leftOut = files.leftOut()
	return out, nil
}

// heldOut says whether a conversation, by its number in the data, is held out.
func (o *ChatOptions) heldOut(i int) bool {
	return o.EvalShare > 0 && float64(mix64(uint64(o.Seed)+mix64(uint64(i)+1))>>11)/(1<<53) < o.EvalShare
}

// add takes the next conversation of the data.
func (c *Conversations) add(one *conversation) error {
	i := c.read
	c.read++
	if c.o.heldOut(i) != c.o.Held {
		c.held++
		return nil
	}
	n := len(one.tokens)
	if n > c.o.Seq {
		c.long++
		if c.o.Drop {
			return nil
		}
		n = c.o.Seq
	}
	targets := int32(0)
	for k := 1; k < n; k++ { // nothing predicts the first
		if one.counted[k] {
			targets++
		}
	}
	if targets == 0 {
		c.empty++
		return nil
	}
	var bytes []byte
	for k, token := range one.tokens[:n] {
		if int(token) >= c.o.Vocab {
			return fmt.Errorf("conversation %d: token %d is beyond the model's vocabulary of %d", i+1, token, c.o.Vocab)
		}
		v := uint32(token) << 1
		if one.counted[k] {
			v |= 1
		}
		bytes = binary.LittleEndian.AppendUint32(bytes, v)
	}
	_, _ = c.hash.Write(bytes) // a hash never fails
	_, _ = c.hash.Write([]byte{0xFF})
	c.starts = append(c.starts, c.starts[len(c.starts)-1]+int64(n))
	c.targets = append(c.targets, targets)
	c.tokens += int64(n)
	c.counted += int64(targets)
	c.values.mem = append(c.values.mem, bytes...)
	c.values.n += int64(n)
	return c.values.spill(spillBytes)
}

// The sink of the pipeline takes conversations by add alone.
func (c *Conversations) count() int64                 { return int64(c.read) }
func (c *Conversations) append([]int32, string) error { return nil }
func (c *Conversations) appendBytes([]byte) error     { return nil }
func (c *Conversations) rollBack(int64) error         { return nil }

// Len is the number of rows.
func (c *Conversations) Len() int64 { return int64(len(c.targets)) }

// Sample fills a row with a conversation. The target of a token is the next one, if that
// is counted.
func (c *Conversations) Sample(i int64, r *Row) error {
	tokens := r.Tokens[:c.starts[i+1]-c.starts[i]]
	if err := c.buffer.Tokens(tokens, c.starts[i]); err != nil {
		return err
	}
	for k, v := range tokens {
		if k > 0 && v&1 == 1 {
			r.Targets[k-1] = v >> 1
		}
		tokens[k] = v >> 1
	}
	return nil
}

// CountTargets is how many targets a row has.
func (c *Conversations) CountTargets(i int64) int { return int(c.targets[i]) }

// Fingerprint tells the conversations and their rows apart from others.
func (c *Conversations) Fingerprint() Fingerprint {
	sum := sha256.Sum256(fmt.Appendf(c.hash.Sum(nil), " seq %d", c.o.Seq))
	return Fingerprint{c.tokens, hex.EncodeToString(sum[:])}
}

// Summary counts what was read, in a line.
func (c *Conversations) Summary() string {
	what := fmt.Sprintf("%d conversations", c.read)
	if c.o.EvalShare > 0 {
		what = fmt.Sprintf("%d of %d conversations", c.read-c.held, c.read)
	}
	long := fmt.Sprintf("%d cut to %d tokens", c.long, c.o.Seq)
	if c.o.Drop {
		long = fmt.Sprintf("%d dropped that are over %d tokens", c.long, c.o.Seq)
	}
	text := fmt.Sprintf("%s, %s, %d dropped without room for an answer: %d tokens, %d targets", what, long, c.empty, c.tokens, c.counted)
	if n := len(c.targets); n > 0 {
		text += fmt.Sprintf(" in %d rows of %d (%.0f %% full)", n, c.o.Seq, 100*float64(c.tokens)/float64(n)/float64(c.o.Seq))
	}
	return text
}

// LeftOut counts the files of a folder that are no conversations; "" where there are none.
func (c *Conversations) LeftOut() string { return c.leftOut }

// Close closes the file of the tokens.
func (c *Conversations) Close() error { return c.buffer.Close() }
