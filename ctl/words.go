package ctl

import (
	"strconv"
	"strings"
	"unicode"
)

// splitWords cuts a line into words at white space. A word in double quotes is a Go string literal, one in single quotes is taken
// as it is; in the middle of a word a quote is a character like others, and a quote that is never closed is dropped.
func splitWords(line string) ([]string, error) {
	var words []string
	for {
		line = strings.TrimLeftFunc(line, unicode.IsSpace)
		if line == "" {
			return words, nil
		}
		switch line[0] {
		case '"':
			end := closingQuote(line)
			if end < 0 {
				line = line[1:]
				continue
			}
			word, err := strconv.Unquote(line[:end+1])
			if err != nil {
				return nil, err
			}
			words, line = append(words, word), line[end+1:]
		case '\'':
			end := strings.IndexByte(line[1:], '\'')
			if end < 0 {
				line = line[1:]
				continue
			}
			words, line = append(words, line[1:end+1]), line[end+2:]
		default:
			end := strings.IndexFunc(line, unicode.IsSpace)
			if end < 0 {
				end = len(line)
			}
			words, line = append(words, line[:end]), line[end:]
		}
	}
}

// closingQuote returns where the double quote that opens s is closed, or -1.
func closingQuote(s string) int {
	for i := 1; i < len(s); i++ {
		switch s[i] {
		case '\\':
			i++
		case '"':
			return i
		}
	}
	return -1
}
