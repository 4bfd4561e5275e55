-- Adds a run of records to the books and moves the cursor behind it: both or neither, so that every
-- record counts once whoever folds.
-- KEYS: cursor, then a book (a hash) per cell. ARGV: the cursor that must be there, the new one, the
-- number of figures, then for each cell: its name, the book's life in seconds, its figures.
-- FIELDS of a cell are `name` and a tab and the figure's number.
-- Returns 1, or 0 when somebody else has moved the cursor.
local at = redis.call('GET', KEYS[1]) or '0-0'
if at ~= ARGV[1] then
  return 0
end
local figures = tonumber(ARGV[3])
local position = 4
for cell = 2, #KEYS do
  local name, life = ARGV[position], ARGV[position + 1]
  for figure = 1, figures do
    local amount = ARGV[position + 1 + figure]
    if amount ~= '0' then
      redis.call('HINCRBY', KEYS[cell], name .. '\t' .. figure, amount)
    end
  end
  redis.call('EXPIRE', KEYS[cell], life)
  position = position + 2 + figures
end
redis.call('SET', KEYS[1], ARGV[2])
return 1
