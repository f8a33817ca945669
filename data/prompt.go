package data

import "fmt"

// hfPost is a post_processor: the special tokens put around a text that is a model's input.
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

// start gives the tokens that a post_processor puts before a single text, such as
// Llama's <s>; nil if none. vocab bounds them.
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

// Prompt returns the tokens of a text that a model is to continue: the start token that
// tokenizer.json puts before a single text, then those of Encode. Training data have no start
// token: EOT separates documents.
func Prompt(tok Tokenizer, text string) []int32 {
	tokens := tok.Encode(text)
	if t, ok := tok.(*bpeTokenizer); ok && len(t.before) > 0 {
		tokens = append(append(make([]int32, 0, len(t.before)+len(tokens)), t.before...), tokens...)
	}
	return tokens
}
