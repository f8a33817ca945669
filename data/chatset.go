package data

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash"

	"github.com/dustin/go-humanize/english"
)

// ChatOptions says how OpenConversations makes rows.
type ChatOptions struct {
	Template string // a Jinja source; "": the model's chat template
	All      bool   // every token is a target, not only those of answers
	Seq      int    // tokens of a row
	Drop     bool   // leaves out conversations that are longer than a row; otherwise they are cut
	// Starts names the model input that marks document starts; then a row holds as many
	// conversations as fit. "": a row holds one.
	Starts string
	Vocab  int // of the model
	// Split selects a part of the conversations.
	Split Split
}

// Conversations holds conversations as rows of tokens, one per row or packed. Tokens of answers
// are the targets.
type Conversations struct {
	o       ChatOptions
	values  *builder // one value per token: 2·token, plus 1 if the token counts in the loss
	buffer  *Buffer
	hash    hash.Hash
	starts  []int64 // index of each conversation's first value, and the end
	targets []int32 // number of targets of each conversation
	order   []int32 // conversation indexes, row by row
	rows    []int32 // index in order of each row's first conversation, and the end
	leftOut string

	long, empty     int // conversations over Seq, without a target
	left            int // those without a target whose answers the template leaves out
	tokens, counted int64
}

// OpenConversations reads conversations (see IsConversations) from JSON lines, Parquet files or
// a folder of them. A record that is not a conversation is an error that names its place. A
// conversation whose prompt leaves no room for a target is dropped and counted in Summary.
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
		return fail(fmt.Errorf("%s: no conversation is left: %s; %s", root, out.Summary(), out.remedy()))
	}
	if out.buffer, err = out.values.finish(); err != nil {
		return fail(err)
	}
	out.leftOut = files.leftOut()
	out.arrange()
	return out, nil
}

// arrange assigns conversations to rows.
func (c *Conversations) arrange() {
	lengths := make([]int, len(c.targets))
	for i := range lengths {
		lengths[i] = int(c.starts[i+1] - c.starts[i])
	}
	if c.o.Starts != "" {
		c.order, c.rows = pack(lengths, c.o.Seq)
		return
	}
	c.rows = []int32{0}
	for i := range lengths {
		c.order, c.rows = append(c.order, int32(i)), append(c.rows, int32(i+1))
	}
}

// add appends the next conversation of the data.
func (c *Conversations) add(one *conversation) error {
	if !c.o.Split.takes() {
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
	for k := 1; k < n; k++ { // no token predicts the first one
		if one.counted[k] {
			targets++
		}
	}
	if targets == 0 {
		c.empty++
		if one.left {
			c.left++
		}
		return nil
	}
	var bytes []byte
	for k, token := range one.tokens[:n] {
		if int(token) >= c.o.Vocab {
			return fmt.Errorf("conversation %d: token %d is beyond the model's vocabulary of %d", c.o.Split.Seen, token, c.o.Vocab)
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

// Methods of sink for plain text. They are not called for conversations.
func (c *Conversations) count() int64                 { return int64(c.o.Split.Seen) }
func (c *Conversations) append([]int32, string) error { return nil }
func (c *Conversations) appendBytes([]byte) error     { return nil }
func (c *Conversations) rollBack(int64) error         { return nil }

// Len returns the number of rows.
func (c *Conversations) Len() int64 { return int64(len(c.rows) - 1) }

// row returns the indexes of the conversations in a row.
func (c *Conversations) row(i int64) []int32 { return c.order[c.rows[i]:c.rows[i+1]] }

// Sample fills a row with conversations. A token's target is the next token of the same
// conversation, if that counts. The rest of the row is a separate document without targets.
func (c *Conversations) Sample(i int64, r *Row) error {
	at, starts := 0, r.Input(c.o.Starts)
	for _, one := range c.row(i) {
		n := int(c.starts[one+1] - c.starts[one])
		tokens := r.Tokens[at : at+n]
		if err := c.buffer.Tokens(tokens, c.starts[one]); err != nil {
			return err
		}
		for k, v := range tokens {
			if k > 0 && v&1 == 1 {
				r.Targets[at+k-1] = v >> 1
			}
			tokens[k] = v >> 1
		}
		for k := at; starts != nil && k < at+n; k++ {
			starts[k] = float32(at)
		}
		at += n
	}
	for k := at; k < len(starts); k++ {
		starts[k] = float32(at)
	}
	return nil
}

// CountTargets returns the number of targets in a row.
func (c *Conversations) CountTargets(i int64) (n int) {
	for _, one := range c.row(i) {
		n += int(c.targets[one])
	}
	return n
}

// Fingerprint identifies the conversations and how they are packed into rows.
func (c *Conversations) Fingerprint() Fingerprint {
	text := fmt.Appendf(c.hash.Sum(nil), " seq %d", c.o.Seq)
	if c.o.Starts != "" {
		text = append(text, " packed"...)
	}
	sum := sha256.Sum256(text)
	return Fingerprint{c.tokens, hex.EncodeToString(sum[:])}
}

// remedy returns the advice for data of which no conversation is left.
func (c *Conversations) remedy() string {
	switch s := c.o.Split; {
	case s.Seen == 0:
		return "give records"
	case s.Taken == 0 && s.Held:
		return fmt.Sprintf("Config.EvalSplit %g%% holds none of them out; give more conversations, a larger Config.EvalSplit, or Config.EvalData", 100*s.Share)
	case s.Taken == 0:
		return fmt.Sprintf("Config.EvalSplit %g%% holds all of them out; give more conversations, a smaller Config.EvalSplit, or Config.EvalData", 100*s.Share)
	case c.long > 0:
		return fmt.Sprintf("give Config.Seq above %d, up to the model's positions, or shorter prompts", c.o.Seq)
	}
	if c.left > 0 {
		return "the chat template leaves out their answers, the messages of role " + answerRole + "; give one with them as Config.Template"
	}
	return "give conversations with answers that are not empty, and not all of weight 0"
}

// Summary describes the data in one line.
func (c *Conversations) Summary() string {
	what := english.Plural(c.o.Split.Seen, "conversation", "")
	if c.o.Split.Share > 0 {
		what = fmt.Sprintf("%d of %s", c.o.Split.Taken, what)
	}
	long := fmt.Sprintf("%d cut to %d tokens", c.long, c.o.Seq)
	if c.o.Drop {
		long = fmt.Sprintf("%d dropped that are over %d tokens", c.long, c.o.Seq)
	}
	text := fmt.Sprintf("%s, %s, %d dropped without room for an answer: %s, %s", what, long, c.empty, english.Plural(int(c.tokens), "token", ""), english.Plural(int(c.counted), "target", ""))
	if n := len(c.rows) - 1; n > 0 {
		packed := ""
		if c.o.Starts != "" {
			packed = "packed "
		}
		text += fmt.Sprintf(" in %s of %d (%.0f %% full)", english.Plural(n, packed+"row", ""), c.o.Seq, 100*float64(c.tokens)/float64(n)/float64(c.o.Seq))
	}
	return text
}

// LeftOut counts a folder's files that hold no conversations; "" if there are none.
func (c *Conversations) LeftOut() string { return c.leftOut }

// Close closes the token file.
func (c *Conversations) Close() error { return c.buffer.Close() }
