package token

import (
	"encoding/json"
	"fmt"
)

// hfStage is a normalizer, pre-tokenizer or decoder.
type hfStage struct {
	Type           string     `json:"type"`
	AddPrefixSpace *bool      `json:"add_prefix_space"` // ByteLevel, Metaspace of before 2024: default true
	UseRegex       *bool      `json:"use_regex"`        // ByteLevel: default true
	Individual     bool       `json:"individual_digits"`
	PreTokenizers  []*hfStage `json:"pretokenizers"`
	Normalizers    []*hfStage `json:"normalizers"`
	Pattern        *struct {
		Regex  *string
		String *string
	} `json:"pattern"`
	Behavior      string     `json:"behavior"`
	Invert        bool       `json:"invert"`
	Prepend       string     `json:"prepend"`        // Prepend
	Content       string     `json:"content"`        // Replace, Strip
	Replacement   string     `json:"replacement"`    // Metaspace
	PrependScheme string     `json:"prepend_scheme"` // Metaspace
	Split         *bool      `json:"split"`          // Metaspace: default true
	Decoders      []*hfStage `json:"decoders"`
	Start         int        `json:"start"` // Strip
	Stop          int        `json:"stop"`  // Strip
}

type hfModel struct {
	Type         string           `json:"type"`
	Dropout      *float64         `json:"dropout"`
	Prefix       *string          `json:"continuing_subword_prefix"`
	Suffix       *string          `json:"end_of_word_suffix"`
	ByteFallback bool             `json:"byte_fallback"`
	IgnoreMerges bool             `json:"ignore_merges"`
	Vocab        json.RawMessage  `json:"vocab"`
	Merges       *json.RawMessage `json:"merges"`
}

type hfAdded struct {
	ID         *int64  `json:"id"`
	Content    *string `json:"content"`
	SingleWord bool    `json:"single_word"`
	LStrip     bool    `json:"lstrip"`
	RStrip     bool    `json:"rstrip"`
	Normalized *bool   `json:"normalized"` // default: the opposite of special
	Special    bool    `json:"special"`
}

// hfPost is a post_processor, which adds special tokens to a text that is a model's input.
type hfPost struct {
	Type       string    `json:"type"`
	Processors []*hfPost `json:"processors"`
	Single     []struct {
		SpecialToken *struct {
			ID string `json:"id"`
		}
		Sequence *struct {
			ID string `json:"id"`
		}
	} `json:"single"`
	SpecialTokens map[string]struct {
		IDs []int64 `json:"ids"`
	} `json:"special_tokens"`
}

// start returns the tokens that a post_processor adds before a single text, such as Llama's <s>;
// nil if there are none. vocab bounds them.
func (p *hfPost) start(vocab, depth int) ([]int32, error) {
	if p == nil || depth > 8 {
		return nil, nil
	}
	for _, sub := range p.Processors {
		if ids, err := sub.start(vocab, depth+1); ids != nil || err != nil {
			return ids, err
		}
	}
	var ids []int32
	for _, item := range p.Single {
		if item.SpecialToken == nil {
			break
		}
		for _, id := range p.SpecialTokens[item.SpecialToken.ID].IDs {
			if id < 0 || id >= int64(vocab) {
				return nil, fmt.Errorf("the post_processor's token %.80q has id %d; it must be 0 to %d", item.SpecialToken.ID, id, vocab-1)
			}
			ids = append(ids, int32(id))
		}
	}
	return ids, nil
}
