package data

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync"

	"github.com/spillway-ml/spillway/data/token"
)

// sink receives the tokens of a corpus, in order.
type sink interface {
	count() int64
	append(tokens []int32, path string) error
	appendBytes(text []byte) error
	rollBack(n int64) error // to the first n tokens
}

// job is a piece that the tokenizing goroutines work on.
type job struct {
	*piece
	tokens [][]int32      // tokens of each part
	chats  []conversation // conversation of each part, if the data are conversations
	err    error          // ends the pipeline
	done   chan struct{}
}

// tokenize runs the corpus through the tokenizer into a sink. One goroutine reads, several
// tokenize, and the caller's adds the tokens in order, so the result does not depend on their
// number. after, if not nil, is called with each position up to which all tokens are in the sink.
//
//	files → documents → jobs → tokenizers
//	                     └─────── in order ──→ sink
func tokenize(ctx context.Context, c *corpus, o Options, to sink, from position, after func(position) error) error {
	workers := o.Threads
	if workers < 1 {
		workers = runtime.GOMAXPROCS(0)
	}
	ctx, cancel := context.WithCancel(ctx)
	work, ordered := make(chan *job, workers), make(chan *job, 2*workers)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()

	tok := o.Tokenizer
	encodeMore := tok.Encode
	cutter, _ := tok.(token.Cutter)
	if cutter != nil {
		encodeMore = cutter.EncodeMore
	}
	isBytes := tok == token.Bytes() && (o.Vocab == 0 || o.Vocab >= 256)
	for range workers {
		wg.Go(func() {
			for j := range work {
				if o.chat != nil {
					j.err = j.converse(o.chat, &c.files[j.file])
				} else if !isBytes {
					for _, p := range j.parts {
						encode := encodeMore
						if p.starts {
							encode = tok.Encode
						}
						j.tokens = append(j.tokens, encode(string(p.text)))
					}
				}
				close(j.done)
			}
		})
	}
	wg.Go(func() {
		defer close(ordered)
		defer close(work)
		d := &documents{c: c, o: o, cutter: cutter}
		taken := true // the current document is in the selected part of the Split
		d.give = func(p *piece) error {
			if o.Split != nil {
				p.parts = slices.DeleteFunc(p.parts, func(part part) bool {
					if part.starts {
						taken = o.Split.takes()
					}
					return !taken
				})
			}
			j := &job{piece: p, done: make(chan struct{})}
			for _, ch := range []chan *job{ordered, work} {
				select {
				case ch <- j:
				case <-ctx.Done():
					return ctx.Err()
				}
			}
			return nil
		}
		if err := d.run(from); err != nil {
			j := &job{err: err, done: make(chan struct{})}
			close(j.done)
			select {
			case ordered <- j:
			case <-ctx.Done():
			}
		}
	})
	s := &collector{c: c, sink: to, eot: tok.EOT(), raw: isBytes, start: from.Before}
	for j := range ordered {
		select {
		case <-j.done:
		case <-ctx.Done():
			return ctx.Err()
		}
		if j.err != nil {
			return j.err
		}
		at, err := s.take(j)
		if err == nil && after != nil {
			err = after(at)
		}
		if err != nil {
			return err
		}
	}
	return ctx.Err()
}

// converse tokenizes the conversations of the job's part of the files.
func (j *job) converse(c *chat, e *entry) error {
	for _, p := range j.parts {
		one, err := c.encode(p.text)
		if err != nil {
			return fmt.Errorf("read %s: %w", e.place(p.record), err)
		}
		j.chats = append(j.chats, one)
	}
	return nil
}

// chatSink receives conversations. No other method of the sink is called.
type chatSink interface{ add(one *conversation) error }

// collector adds the jobs' tokens to the sink, with the end-of-text token between documents.
type collector struct {
	c     *corpus
	sink  sink
	eot   int32 // -1: none
	raw   bool  // tokens are the bytes of the text
	owed  bool  // an EOT must precede the next token
	start int64 // tokens before the current file
}

// take adds a job's tokens and returns the position where they end.
func (s *collector) take(j *job) (position, error) {
	next := position{j.file, j.end, s.start}
	if j.drop != nil {
		if s.c.files[j.file].only {
			return next, j.drop
		}
		s.c.left[notText]++
		return position{j.file + 1, 0, s.start}, s.sink.rollBack(s.start)
	}
	for i := range j.chats {
		if err := s.sink.(chatSink).add(&j.chats[i]); err != nil {
			return next, err
		}
	}
	if j.chats != nil {
		return next, nil
	}
	for i, p := range j.parts {
		s.owed = s.owed || p.starts
		if len(p.text) == 0 {
			continue
		}
		if s.owed && s.eot >= 0 && s.sink.count() > 0 {
			if err := s.sink.append([]int32{s.eot}, s.c.files[j.file].path); err != nil {
				return next, err
			}
		}
		s.owed = false
		var err error
		if s.raw {
			err = s.sink.appendBytes(p.text)
		} else {
			err = s.sink.append(j.tokens[i], s.c.files[j.file].path)
		}
		if err != nil {
			return next, err
		}
	}
	if j.last {
		s.start = s.sink.count()
		next = position{j.file + 1, 0, s.start}
	}
	return next, nil
}
