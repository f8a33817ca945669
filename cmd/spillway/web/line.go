// Command web is the planner in the browser. Compiled for GOOS=js it answers one command line of
// spillway plan; elsewhere it builds the folder of static files that asks it.
package main

import (
	"errors"
	"strings"
)

// split returns the words of a command line as a shell takes them: quotes, backslashes and continued
// lines, also where the line ends are lost, but no variables or patterns.
func split(line string) (words []string, err error) {
	var word strings.Builder
	var quote rune
	begun, escaped := false, false
	for _, r := range line {
		switch {
		case escaped:
			escaped = false
			switch {
			case r == '\n' && quote == 0: // the line continues
			case !begun && strings.ContainsRune(" \t\r", r): // it did: an address has no line ends
			case quote == '"' && !strings.ContainsRune("$`\"\\\n", r):
				word.WriteString(`\` + string(r))
			default:
				begun = true
				word.WriteRune(r)
			}
		case r == '\\' && quote != '\'':
			escaped = true
		case r == quote:
			quote = 0
		case quote == 0 && (r == '\'' || r == '"'):
			quote, begun = r, true
		case quote == 0 && strings.ContainsRune(" \t\r\n", r):
			if begun {
				words = append(words, word.String())
			}
			word.Reset()
			begun = false
		default:
			begun = true
			word.WriteRune(r)
		}
	}
	if quote != 0 || escaped {
		return nil, errors.New("the command line: a quote or backslash is left open; close it")
	}
	if begun {
		words = append(words, word.String())
	}
	return words, nil
}

// command returns the words of a command line of spillway, of which the command's name and plan
// may be left out. A train command, as plan prints it, asks for its plan.
func command(line string) ([]string, error) {
	words, err := split(line)
	if err != nil {
		return nil, err
	}
	for len(words) > 0 && (words[0] == "$" || words[0] == "spillway") {
		words = words[1:]
	}
	if len(words) == 0 || strings.HasPrefix(words[0], "-") {
		words = append([]string{"plan"}, words...)
	}
	if words[0] == "train" {
		words[0] = "plan"
	}
	return words, nil
}

// fill returns the values of the form's flags in a command's words, the last of each, and the other
// words. Every flag of the form takes a value.
func fill(words, form []string) (values map[string]string, rest []string) {
	values = map[string]string{}
	of := map[string]bool{}
	for _, name := range form {
		of["--"+name] = true
	}
	for i := 0; i < len(words); i++ {
		name, value, joined := strings.Cut(words[i], "=")
		switch {
		case !of[name]:
			rest = append(rest, words[i])
			continue
		case !joined && i+1 < len(words):
			i++
			value = words[i]
		}
		values[strings.TrimPrefix(name, "--")] = value
	}
	return values, rest
}
