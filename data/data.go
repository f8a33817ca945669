// Package data converts token files and text to batches.
//
// A Source is a sequence of tokens: a token file, or text run through a Tokenizer. A Sampler
// chooses the window of the source for each row of each batch, as a pure function of (step,
// micro-batch, rank, row). A resumed run therefore continues with exactly the batches of an
// uninterrupted one, and no state is saved.
package data

import (
	"github.com/spillway-ml/spillway/data/token"
)

// Source is a sequence of tokens. Its methods may be called concurrently.
type Source interface {
	// Len returns the number of tokens.
	Len() int64
	// Tokens fills dst with tokens [start, start+len(dst)). A range outside of
	// the source is an error.
	Tokens(dst []int32, start int64) error
}

// TargetSource is a Source with separate targets, instead of the next tokens.
type TargetSource interface {
	Source
	// Targets fills dst with the targets of the inputs [start,
	// start+len(dst)). -1 is ignored in the loss and in its count.
	Targets(dst []int32, start int64) error
}

// Options says how Open reads data.
type Options struct {
	// Tokenizer reads text. Nil means bytes. Token files do not use it.
	Tokenizer token.Tokenizer
	// Vocab is the model's vocabulary: a token at or beyond it is an error that names the token and
	// its index. 0 means the tokenizer's vocabulary for text, and no check for a token file.
	Vocab int
	// Glob, as in path.Match on a file's base name, limits which files of a
	// folder are read, such as "*.go". Empty means all.
	Glob string
	// TextField is the field of the records of JSON lines (*.jsonl) that holds
	// their text. Empty: none, and JSON lines are refused.
	TextField string
	// Threads bounds the goroutines that tokenize. 0 means all cores.
	Threads int
	// Split selects a part of the documents; nil selects all. Token files have no documents.
	Split *Split

	chat *chat // set if the data are conversations
}

// Split divides documents into a held-out part and the rest. The seed decides; Share is the
// held-out fraction. Opening text with a Split counts its documents in Seen and Taken.
type Split struct {
	Seed  int64
	Share float64
	Held  bool // selects the held-out part; otherwise the rest

	Seen, Taken int // documents
}

// takes says whether the next document belongs to the selected part.
func (s *Split) takes() bool {
	i := s.Seen
	s.Seen++
	held := s.Share > 0 && float64(mix64(uint64(s.Seed)+mix64(uint64(i)+1))>>11)/(1<<53) < s.Share
	if held != s.Held {
		return false
	}
	s.Taken++
	return true
}
